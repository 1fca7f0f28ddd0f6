"""From the engine's thread to the client: order, completeness, Unicode, slow readers, errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgi_driver import Client, finishes_of, text_of
from fastapi import FastAPI
from scripted_engine import ACCEPTED, DRAFTED, Script, ScriptedEngine

from flexspec.errors import QueueFullError
from flexspec.runtime.engine.api import Delta
from flexspec.runtime.server.answer import Inbox
from flexspec.runtime.server.openai import to_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MakeApp = Callable[[ScriptedEngine], FastAPI]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny/scripted", "prompt": "go", "stream": True, "max_tokens": 1000, **more}


def run(app: FastAPI, path: str, request: dict[str, Any]) -> Client:
    async def main() -> Client:
        client = Client(app, path, request)
        await client.run()
        return client

    return asyncio.run(main())


def test_inbox_keeps_every_delta_of_every_thread_in_order() -> None:
    threads, each = 8, 400

    async def read() -> dict[int, list[str]]:
        inbox = Inbox(asyncio.get_running_loop())

        def write(index: int) -> None:
            for number in range(each):
                inbox.put(index, Delta(str(number), ()))

        writers = [threading.Thread(target=write, args=(index,)) for index in range(threads)]
        for writer in writers:
            writer.start()
        got: dict[int, list[str]] = {index: [] for index in range(threads)}
        while any(len(texts) < each for texts in got.values()):
            for index, delta in await asyncio.wait_for(inbox.get(), 10):
                got[index].append(delta.text)
        for writer in writers:
            writer.join()
        return got

    assert asyncio.run(read()) == {index: [str(number) for number in range(each)] for index in range(threads)}


def test_a_delta_for_a_closed_loop_does_not_hurt_the_engine() -> None:
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    loop.close()
    inbox.put(0, Delta("late", ()))
    inbox.put(0, Delta("later", ()))


ODD_TEXTS = {
    "emoji": ["👩‍👩‍👧", "😀", "🇨🇭"],
    "scripts": ["日本", "語", "ß", "é", "e\u0301"],
    "line breaks": ["a\nb", "\r\n", "\x85", "\u2028", "\u2029", "\x0b\x0c\x1c\x1e"],
    "sse words": ["data: [DONE]\n\n", "\n\n", 'quote " and \\', "\x00"],
}


@pytest.mark.parametrize("name", ODD_TEXTS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_text_is_lost_or_changed(name: str, path: str, engine: ScriptedEngine, make_app: MakeApp) -> None:
    engine.script = Script(ODD_TEXTS[name])
    request = body()
    if path == CHAT:
        del request["prompt"]
        request["messages"] = [{"role": "user", "content": "go"}]
    client = run(make_app(engine), path, request)
    assert client.events[-1] == "[DONE]"
    assert text_of(client.events) == "".join(ODD_TEXTS[name])
    stream = b"".join(client.chunks).decode("utf-8")
    assert all(line == "" or line.startswith("data: ") for line in stream.splitlines())  # readers like httpx split so


def test_text_is_sent_as_utf8_and_a_lone_surrogate_as_its_escape() -> None:
    assert "é😀".encode() in to_json({"text": "é😀"})
    assert json.loads(to_json({"text": "a\udc80\u2028"})) == {"text": "a\udc80\u2028"}


def test_a_chat_stream_has_openais_shape(engine: ScriptedEngine, make_app: MakeApp) -> None:
    request = {"model": "tiny/scripted", "messages": [{"role": "user", "content": "go"}], "stream": True}
    client = run(make_app(engine), CHAT, {**request, "stream_options": {"include_usage": True}})
    *chunks, last, done = client.events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in (*chunks, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    prompt = 1 + len("<user>go\n<assistant>")  # BOS
    assert last["choices"] == [] and last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2,
        "total_tokens": prompt + 2,
        "flexspec": {"rounds": 1, "drafted": DRAFTED, "accepted": ACCEPTED, "tokens_per_round": 1.0},
    }
    without = run(make_app(engine), CHAT, request)
    assert all("usage" not in chunk for chunk in without.events[:-1])


def test_usage_pools_choices_and_counts_each_prompt_once(engine: ScriptedEngine, make_app: MakeApp) -> None:
    engine.script = lambda ids, params: Script(["x"] * (2 if ids[-1] == ord("a") else 10))
    request = body(prompt=["a", "b"], n=2, stream_options={"include_usage": True})
    client = run(make_app(engine), TEXT, request)
    assert client.events[-2]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 24,
        "total_tokens": 28,
        "flexspec": {"rounds": 20, "drafted": 20 * DRAFTED, "accepted": 20 * ACCEPTED, "tokens_per_round": 1.0},
    }
    assert [text_of(client.events, index) for index in range(4)] == ["xx", "xx", "x" * 10, "x" * 10]
    assert finishes_of(client.events) == dict.fromkeys(range(4), "stop")


def test_a_reader_that_stands_still_holds_up_nobody_and_loses_nothing(
    engine: ScriptedEngine, make_app: MakeApp
) -> None:
    pieces = [f"{number} " for number in range(900)]
    engine.script = Script(pieces)

    async def main() -> Client:
        app = make_app(engine)
        slow = Client(app, TEXT, body(prompt="slow"))
        slow.writable.clear()
        reading = asyncio.ensure_future(slow.run())
        quick = Client(app, TEXT, body(prompt="quick"))
        await quick.run()
        assert text_of(quick.events) == "".join(pieces)
        await asyncio.to_thread(engine.wait_until, engine.idle)  # the engine is done although nothing could be written
        assert slow.chunks == []
        slow.writable.set()
        await reading
        return slow

    slow = asyncio.run(main())
    assert text_of(slow.events) == "".join(pieces)
    assert len(slow.events) <= 4  # what piled up comes in one piece


def test_an_error_in_a_stream_comes_after_the_text_and_ends_all_choices(
    engine: ScriptedEngine, make_app: MakeApp
) -> None:
    engine.script = lambda ids, params: (
        Script(("half",), "error", "rank 1 is gone") if params.seed == 1 else Script(["x"] * 10**6)
    )
    client = run(make_app(engine), TEXT, body(n=2, seed=0, max_tokens=10**6, stream_options={"include_usage": True}))
    *_, error, done = client.events
    assert done == "[DONE]"
    assert error["error"] == {
        "message": "rank 1 is gone",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert text_of(client.events, 1) == "half"
    engine.wait_until(engine.idle)
    assert engine.ended == {1: "cancelled", 2: "error"}


def test_an_error_without_a_stream_is_a_500(engine: ScriptedEngine, make_app: MakeApp) -> None:
    engine.script = Script(("half",), "error", "rank 1 is gone")
    client = run(make_app(engine), TEXT, body(stream=False))
    assert client.status == 500
    assert json.loads(client.chunks[0])["error"]["message"] == "rank 1 is gone"


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_finds_the_queue_full_takes_the_others_back(
    stream: bool, gated_engine: ScriptedEngine, make_app: MakeApp
) -> None:
    gated_engine.refusal = QueueFullError("8 requests are waiting", "fewer", "come again", retry_after_s=3)
    gated_engine.refuse_after = 2
    client = run(make_app(gated_engine), TEXT, body(n=3, stream=stream))
    assert client.status == 503
    gated_engine.wait_until(gated_engine.idle)
    assert gated_engine.ended == {1: "cancelled", 2: "cancelled"}


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(
    stream: bool, blocked: bool, gated_engine: ScriptedEngine, make_app: MakeApp
) -> None:
    gated_engine.script = Script(["x"] * 100)

    async def main() -> None:
        app = make_app(gated_engine)
        client = Client(app, TEXT, body(stream=stream, n=2))
        if blocked:
            client.writable.clear()
        reading = asyncio.ensure_future(client.run())
        await asyncio.to_thread(gated_engine.wait_until, lambda: len(gated_engine.submitted) == 2)
        gated_engine.allow(3)
        if stream and not blocked:
            await client.written(lambda body: body.count(b'"x') > 0)
        client.leave()
        await asyncio.wait_for(reading, 10)
        await asyncio.to_thread(gated_engine.wait_until, gated_engine.idle)

    asyncio.run(main())
    assert gated_engine.ended == {1: "cancelled", 2: "cancelled"}


def test_a_request_that_ended_is_not_cancelled(engine: ScriptedEngine, make_app: MakeApp) -> None:
    assert run(make_app(engine), TEXT, body()).status == 200
    assert engine.cancelled == []


def test_a_client_that_leaves_while_sending_its_body_asks_nothing(engine: ScriptedEngine, make_app: MakeApp) -> None:
    async def main() -> None:
        client = Client(make_app(engine), TEXT, body())
        client._inbox.clear()
        client.leave()
        await client.run()
        assert client.status == 499

    asyncio.run(main())
    assert engine.submitted == []
