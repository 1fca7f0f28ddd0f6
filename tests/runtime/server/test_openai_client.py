"""OpenAI's own client against the real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ACCEPTED, DRAFTED, Script, ScriptedEngine

from flexspec.errors import CapacityError, QueueFullError

openai = pytest.importorskip("openai")

MODEL = "tiny/scripted"
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(engine: ScriptedEngine, start: Callable[..., Any]) -> Iterator[Any]:
    with openai.OpenAI(base_url=start(engine).url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: Any, engine: ScriptedEngine) -> None:
    engine.script = Script(("Grüß ", "dich ", "👋🏽"))
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, n=2, seed=5, stop=["x"])
    assert [choice.message.content for choice in answer.choices] == ["Grüß dich 👋🏽"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage.completion_tokens == 6
    assert answer.usage.flexspec["drafted"] == 4 * DRAFTED and answer.usage.flexspec["accepted"] == 4 * ACCEPTED
    assert [params.seed for _, params in engine.submitted] == [5, 6]


def test_an_answer_can_be_sent_back_as_it_came(client: Any) -> None:
    message = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message
    for turn in (message, message.model_dump()):
        again = client.chat.completions.create(model=MODEL, messages=[*HELLO, turn, *HELLO])
        assert again.choices[0].message.content == "Hello world"


def test_chat_stream(client: Any, engine: ScriptedEngine) -> None:
    engine.script = Script(["日本", "語\n", "👋🏽", "\u2028 end"])
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "日本語\n👋🏽\u2028 end"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == 4
    assert last.usage.flexspec == {
        "rounds": 3,
        "drafted": 3 * DRAFTED,
        "accepted": 3 * ACCEPTED,
        "tokens_per_round": 1.0,
    }


def test_completions(client: Any, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], extra_body={"top_k": 5, "min_p": 0.1})
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    assert {(params.top_k, params.min_p) for _, params in engine.submitted} == {(5, 0.1)}
    stream = client.completions.create(model=MODEL, prompt=[1, 2, 3], stream=True, max_tokens=1)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_are_the_clients_own(client: Any, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert refused.value.param == "logprobs"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    engine.refusal = CapacityError("900 tokens", "at most 512", "shorten it")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x")
    assert refused.value.code == "context_length_exceeded"
    engine.refusal = QueueFullError("8 waiting", "fewer", "come again")
    with pytest.raises(openai.InternalServerError) as full:
        client.completions.create(model=MODEL, prompt="x", stream=True)
    assert full.value.status_code == 503 and full.value.response.headers["retry-after"] == "1"


def test_an_error_in_a_stream_is_raised(client: Any, engine: ScriptedEngine) -> None:
    engine.script = Script(("half",), "error", "rank 1 is gone")
    got: list[str] = []
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        for chunk in client.completions.create(model=MODEL, prompt="x", stream=True):
            got.append(chunk.choices[0].text)
    assert got == ["half"]


def test_a_full_queue_is_tried_again_by_the_client(engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    attempts: list[int] = []

    class OnceFull(QueueFullError):
        """Makes room when it is raised."""

        def __init__(self) -> None:
            super().__init__("8 waiting", "fewer", "come again", retry_after_s=0)

        def __str__(self) -> str:
            attempts.append(1)
            engine.refusal = None
            return "full"

    engine.refusal = OnceFull()
    url = start(engine).url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=1, timeout=10) as client:
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "Hello world"
    assert attempts


def test_responses(client: Any, engine: ScriptedEngine) -> None:
    answer = client.responses.create(model=MODEL, input="hello", instructions="Be brief.", max_output_tokens=5)
    assert (answer.output_text, answer.status) == ("Hello world", "completed")
    assert answer.usage.output_tokens == 2
    turns = [{"role": "user", "content": "hello"}, *[item.model_dump() for item in answer.output]]
    again = client.responses.create(model=MODEL, input=[*turns, {"role": "user", "content": "more"}])
    assert again.output_text == "Hello world"
    with client.responses.stream(model=MODEL, input="hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "Hello world"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_request_ids(client: Any) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, extra_headers={"x-request-id": "mine"}
    )
    assert answer.request_id == "mine"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-9")
    assert missing.value.request_id
