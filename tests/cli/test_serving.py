"""``flexspec serve`` on a real artifact: the official client, clients that leave, signals, and models without chat."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from artifacts import tiny_artifact
from commands import Server, flexspec, serving
from prometheus_client import CollectorRegistry

from flexspec.runtime.engine.thread import EngineThread
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.server.app import create_app
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.requests import ServerLimits
from flexspec.sampling import SamplingParams

pytestmark = pytest.mark.slow(reason="servers in processes of their own")

TIMEOUT_S = 120.0
ASK = {"model": "tiny", "prompt": "hello 12 hello", "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def artifact() -> Path:
    return tiny_artifact()


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Server]:
    with serving(artifact, "--threads", "1", "--kv-tokens", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def reference(artifact: Path) -> str:
    """Text of ASK by plain decoding in this process."""
    served = open_engine(artifact, ServeOptions(draft="off", threads=1))
    (completion,) = served.generate([str(ASK["prompt"])], SamplingParams(max_tokens=60))
    served.close()
    return completion.text


def free_pages(server: Server) -> tuple[float, float]:
    text = httpx.get(server.url + "/metrics", timeout=TIMEOUT_S).text
    free, total = (re.search(rf"^flexspec_kv_pages_{kind} (\S+)$", text, re.M) for kind in ("free", "total"))
    assert free and total
    return float(free[1]), float(total[1])


def test_completions_stream_and_whole_are_plain_decoding(client: openai.OpenAI, reference: str) -> None:
    whole = client.completions.create(**ASK)  # type: ignore[call-overload]
    assert whole.choices[0].text == reference
    stream = client.completions.create(**ASK, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in stream) == reference
    assert any(ord(char) > 127 for char in reference)  # characters of several tokens are in play
    stop = reference[7:9]
    cut = client.completions.create(**ASK, stop=[stop])  # type: ignore[call-overload]
    assert cut.choices[0].text == reference[: reference.index(stop)] and cut.choices[0].finish_reason == "stop"


def test_chat_choices_seeds_and_usage(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello 🎉"}]
    told = [
        client.chat.completions.create(
            model="tiny", messages=messages, n=4, temperature=1.0, seed=7, max_completion_tokens=12
        )
        for _ in range(2)
    ]
    texts = [[choice.message.content for choice in one.choices] for one in told]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    usage = told[0].usage
    assert usage is not None and usage.completion_tokens <= 48 and usage.prompt_tokens > 10
    stream = client.chat.completions.create(
        model="tiny", messages=messages, n=4, temperature=1.0, seed=7, max_completion_tokens=12, stream=True
    )
    streamed = ["", "", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts[0]
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_refusals_of_the_engine_are_the_clients_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model="tiny", prompt="x" * 900)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=9)


def test_clients_that_leave_give_their_pages_back(server: Server, client: openai.OpenAI, reference: str) -> None:
    async def leave(http: httpx.AsyncClient, chance: random.Random) -> None:
        ask = {**ASK, "max_tokens": 180, "stream": chance.random() < 0.7, "n": chance.choice((1, 2))}
        try:
            async with asyncio.timeout(chance.random() * 2.0):
                async with http.stream("POST", "/v1/completions", json=ask) as response:
                    async for _ in response.aiter_raw():
                        if chance.random() < 0.05:
                            return
        except TimeoutError:
            pass

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as http:
            await asyncio.gather(*(leave(http, random.Random(i)) for i in range(64)))

    asyncio.run(crowd())
    assert client.completions.create(**ASK).choices[0].text == reference  # type: ignore[call-overload]
    while httpx.get(server.url + "/health", timeout=TIMEOUT_S).json()["running"]:
        pass
    free, total = free_pages(server)
    assert free == total == 64.0


def test_a_second_server_on_the_port_is_refused_and_the_first_goes_on(
    server: Server, artifact: Path, client: openai.OpenAI
) -> None:
    done = flexspec("serve", artifact, "--port", server.url.rsplit(":", 1)[1])
    assert done.returncode == 2 and "FS602" in done.stderr
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_a_signal_lets_a_stream_finish(artifact: Path, reference: str) -> None:
    with serving(artifact, "--threads", "1") as running:
        text = ""
        with httpx.stream("POST", running.url + "/v1/completions", json={**ASK, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            text += next(lines) + "\n"
            running.process.terminate()
            text += "\n".join(lines)
        assert text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text.replace(" ", "")
        assert running.process.wait(60) == 0


def test_a_model_without_a_chat_template_completes_and_says_why_it_cannot_chat(artifact: Path) -> None:
    served = open_engine(artifact, ServeOptions(threads=1, measure=False))
    thread = EngineThread(served.engine)
    metrics = Metrics(CollectorRegistry())
    app = create_app(served.engine, served.tokenizer, None, "tiny", metrics, ServerLimits(served.context_tokens))

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            return await http.post("/v1/chat/completions", json=chat), await http.post("/v1/completions", json=ASK)

    try:
        chat, text = asyncio.run(ask())
    finally:
        thread.close()
        served.close()
    assert chat.status_code == 400 and "chat template" in chat.json()["error"]["message"]
    assert text.status_code == 200 and text.json()["choices"][0]["text"]


def test_an_artifact_written_while_it_is_served_ends_the_server_with_a_word(artifact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifact, tmp_path / "copy.fspec"))
    with serving(copy) as server:
        weights = next(copy.glob("weights/*"))
        with weights.open("r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(bytes(range(16)))
        assert server.process.wait(60) == 1
        assert server.process.stderr is not None
        last = server.process.stderr.read()
        assert f"written while it was served (the contents of weights/{weights.name} changed)" in last
