"""Bodies of the two generating endpoints, checked and turned into engine requests.

Owns which parameters are offered, their types and their defaults. SamplingParams checks ranges, the engine token ids
and lengths, and refusals.py what is not offered. The default temperature is OpenAI's 1.0, not the engine's 0.0: a
client that leaves it out gets what it gets elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from flexspec.errors import RequestError, TokenizerError
from flexspec.runtime.engine.api import check_prompt_ids
from flexspec.runtime.server.bodies.context_limit import check_fits
from flexspec.runtime.server.bodies.messages import (
    Message,
    parse_messages,
    refuse_unencodable,
    refused_message_keys,
    spell_tool_turns,
)
from flexspec.runtime.server.bodies.neutral import CHAT_NEUTRAL, STREAM_NEUTRAL, TEXT_NEUTRAL, NeutralValues
from flexspec.runtime.server.bodies.refusals import Refused, refuse, refused_keys, shown
from flexspec.sampling import SamplingParams, sampling_fields

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat answer may use the rest of the context
_SEED_SPAN = 2**64


class Tokenizer(Protocol):
    """Text to token ids and back; ``add_special`` puts the tokens that begin a document (BOS) in front, if missing."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token_bytes(self) -> int | None: ...  # of a text, behind one token; None without a bound

    def encode(self, text: str, add_special: bool) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ChatRenderer(Protocol):
    """A chat to the text the model was trained on, with its special tokens; BOS only if the template writes it."""

    @property
    def knows_tools(self) -> bool: ...

    def render(self, messages: Sequence[Message]) -> str: ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server accepts."""

    context_tokens: int  # prompt and answer together
    default_max_tokens: int | None = None  # of a chat answer; None: the rest of the context
    max_choices: int = 128  # of one HTTP request
    max_body_bytes: int = 8 << 20
    stall_s: float = 60.0  # with work pending, a last step older than this makes /health say 503


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine request: choice ``index`` of the answer."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked HTTP request."""

    kind: Literal["chat", "text", "response"]
    model: str
    samples: tuple[Sample, ...]
    prompt_tokens: int  # each prompt counted once, however many choices it has
    stream: bool
    include_usage: bool
    continuous_usage: bool = False  # every chunk of a stream has the usage so far
    echoes: tuple[str, ...] = ()  # the text in front of each choice
    extra: Mapping[str, object] = field(default_factory=dict)  # values that the answer repeats


class StreamOptions(BaseModel):
    """``include_usage`` adds a last chunk with the usage; with ``continuous_usage_stats`` every chunk has it so far."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


Body = TypeVar("Body", bound=BaseModel)


def _with_sampling_fields(body: type[Body]) -> type[Body]:
    """``body`` and those sampling parameters that it does not declare, with the type and default of SamplingParams."""
    types = get_type_hints(SamplingParams)
    missing = {f.name: (types[f.name], f.default) for f in fields(SamplingParams) if f.name not in body.model_fields}
    return create_model(body.__name__, __base__=body, __doc__=body.__doc__, **missing)  # type: ignore[call-overload, no-any-return]


def _off(top_k: object) -> object:
    return 0 if top_k == -1 else top_k  # vLLM's spelling of "all tokens"


@_with_sampling_fields
class GenerateBody(BaseModel):
    """Parameters of both endpoints: every field of SamplingParams, of which those that differ in HTTP are declared."""

    model_config = ConfigDict(strict=True)
    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, description="the newer name of max_tokens")
    temperature: float = 1.0
    top_k: Annotated[int, BeforeValidator(_off)] = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int = Field(default=1, ge=1, le=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]


class CompletionBody(GenerateBody):
    """POST /v1/completions. The prompt is checked by ``parse_prompts``: its union is too wide for good messages."""

    prompt: Any = Field(json_schema_extra={"description": "string, strings, token ids, or lists of token ids"})
    echo: bool = False


def read_chat(
    body: Mapping[str, object], tokenizer: Tokenizer, chat: ChatRenderer | None, limits: ServerLimits
) -> GenerationRequest:
    """Check a chat body and tokenize it. Raises RequestError with the parameter's name.

    ``chat`` None: the model has no chat template, and every chat is refused.
    """
    parsed = validate(ChatBody, body, CHAT_NEUTRAL, refused_message_keys(body.get("messages")))
    prompt = render_prompt(parse_messages(parsed.messages), tokenizer, chat)
    return build_request("chat", parsed, [prompt], limits.default_max_tokens, limits)


def render_prompt(messages: list[Message], tokenizer: Tokenizer, chat: ChatRenderer | None) -> list[int]:
    """Token ids of the prompt for the next turn of a chat. Raises RequestError if the model has no such chats."""
    if chat is None:
        raise RequestError(
            "a chat for a model without a chat template", "a prompt", "use /v1/completions", param="messages"
        )
    try:
        text = chat.render(messages if chat.knows_tools else spell_tool_turns(messages))
    except TokenizerError as error:
        raise RequestError(error.found, error.expected, error.fix, param="messages") from error
    # BOS exactly once: some templates write it, others leave it to the tokenizer, which adds it only if missing. A
    # second one would shift the whole prompt (vllm#9519).
    return tokenizer.encode(text, True)


def read_completion(body: Mapping[str, object], tokenizer: Tokenizer, limits: ServerLimits) -> GenerationRequest:
    """Check a completion body and tokenize it. Raises RequestError with the parameter's name."""
    parsed = validate(CompletionBody, body, TEXT_NEUTRAL)
    prompts = parse_prompts(parsed.prompt, limits)
    token_lists = [tokenizer.encode(item, True) if isinstance(item, str) else item for item in prompts]
    echoes = [_echo(prompt, tokenizer) for prompt in prompts] if parsed.echo else []
    return build_request("text", parsed, token_lists, COMPLETION_MAX_TOKENS, limits, echoes=echoes)


def _echo(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    check_prompt_ids(prompt, tokenizer.vocab_size)
    return tokenizer.decode(prompt)


def _asked_tokens(parsed: GenerateBody) -> tuple[int | None, str]:
    """The length that the request names, if it does, and the name that it uses for it."""
    output_tokens: int | None = getattr(parsed, "max_output_tokens", None)  # of /v1/responses
    if output_tokens is not None:
        return output_tokens, "max_output_tokens"
    if parsed.max_completion_tokens is None:
        return parsed.max_tokens, "max_tokens"
    if parsed.max_tokens not in (None, parsed.max_completion_tokens):
        raise RequestError(
            f"max_tokens={parsed.max_tokens} and max_completion_tokens={parsed.max_completion_tokens}",
            "one limit", "send max_completion_tokens only", param="max_completion_tokens",
        )  # fmt: skip
    return parsed.max_completion_tokens, "max_completion_tokens"


def parse_prompts(prompt: object, limits: ServerLimits) -> list[str] | list[list[int]]:
    """Each prompt of a string, strings, token ids, or lists of token ids. Raises RequestError for anything else."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
    else:
        raise _bad_prompt(prompt)
    if len(prompts) > limits.max_choices:
        raise RequestError(
            f"{len(prompts)} prompts", f"at most {limits.max_choices}", "send fewer prompts per request", param="prompt"
        )
    if all(isinstance(item, str) for item in prompts):
        for item in prompts:
            refuse_unencodable(item, "prompt")
    elif not all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompts):
        raise _bad_prompt(prompt)
    return prompts


def _bad_prompt(prompt: object) -> RequestError:
    return RequestError(
        f"prompt={shown(prompt)}", "a string, a list of strings, of token ids, or of lists of token ids",
        "send one of these, not empty", param="prompt",
    )  # fmt: skip


def build_request(
    kind: Literal["chat", "text", "response"],
    parsed: GenerateBody,
    prompts: Sequence[list[int]],
    default_max_tokens: int | None,
    limits: ServerLimits,
    *,
    echoes: Sequence[str] = (),
    extra: Mapping[str, object] | None = None,
) -> GenerationRequest:
    """``default_max_tokens`` is for a request that names no length; it gives way to the context, None is the rest."""
    if len(prompts) * parsed.n > limits.max_choices:
        raise RequestError(
            f"{len(prompts)} prompts with n={parsed.n}", f"at most {limits.max_choices} choices", "send a smaller n",
            param="n",
        )  # fmt: skip
    longest = max(map(len, prompts))
    rest = max(1, min(limits.context_tokens - longest, int(sampling_fields()["max_tokens"].high or 0)))
    asked, name = _asked_tokens(parsed)
    max_tokens = min(rest, default_max_tokens or rest) if asked is None else asked
    params = [_params(parsed, max_tokens, name, nth) for nth in range(parsed.n)]
    check_fits(longest, asked, limits.context_tokens)
    options = parsed.stream_options
    if options is not None and options.include_usage and not parsed.stream:
        raise RequestError(
            "stream_options without stream", "stream=true", "leave stream_options out", param="stream_options"
        )
    samples = tuple(
        Sample(place * parsed.n + nth, ids, params[nth]) for place, ids in enumerate(prompts) for nth in range(parsed.n)
    )
    return GenerationRequest(
        kind,
        parsed.model,
        samples,
        sum(map(len, prompts)),
        parsed.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
        echoes=tuple(text for text in echoes for _ in range(parsed.n)),
        extra=extra or {},
    )


def _params(parsed: GenerateBody, max_tokens: int, max_tokens_name: str, nth: int) -> SamplingParams:
    """Parameters of the nth choice of a prompt; the seed grows by one per choice, so that choices differ."""
    stop = (parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop or ())
    for text in stop:
        refuse_unencodable(text, "stop")
    seed = parsed.seed
    if seed is not None and seed + nth >= _SEED_SPAN > seed:
        seed -= _SEED_SPAN
    try:
        return SamplingParams(
            **{
                **{name: getattr(parsed, name) for name in sampling_fields()},
                "max_tokens": max_tokens,
                "seed": None if seed is None else seed + nth,
                "stop": stop,
            }
        )
    except RequestError as error:
        if error.param == "max_tokens" != max_tokens_name:
            found = error.found.replace("max_tokens", max_tokens_name)
            fix = error.fix.replace("max_tokens", max_tokens_name)
            raise RequestError(found, error.expected, fix, param=max_tokens_name) from None
        raise


def validate(
    shape: type[Body], body: Mapping[str, object], neutral: NeutralValues, refused: Sequence[Refused] = ()
) -> Body:
    """``body`` as ``shape``. Names all keys that are not offered at once, ``refused`` (found elsewhere) among them."""
    values = {key: value for key, value in body.items() if key in shape.model_fields and value is not None}
    options = values.get("stream_options")
    others: list[Refused] = []
    if isinstance(options, dict):
        others = refused_keys(options, StreamOptions.model_fields, STREAM_NEUTRAL, "stream_options.", "stream_options.")
        values["stream_options"] = {key: value for key, value in options.items() if value is not None}
    refuse([*refused_keys(body, shape.model_fields, neutral), *others, *refused])
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _type_error(first["loc"], first["type"], first["msg"], first["input"]) from None


def _type_error(where: tuple[int | str, ...], kind: str, message: str, value: object) -> RequestError:
    name = str(where[0])
    if name == "stream_options" and len(where) > 1:
        name = f"stream_options.{where[1]}"
    if kind == "missing":
        return RequestError(f"no {name}", f"a value for {name}", f"send {name}", param=name)
    expected = "a string or a list of strings" if name == "stop" else message[0].lower() + message[1:]
    return RequestError(f"{name}={shown(value)}", expected, f"send {name} with that type", param=name)
