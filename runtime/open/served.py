"""An opened artifact: its engine, what callers need besides, and the way from prompts to completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flexspec.compiler.artifact.plan import Plan
from flexspec.draft_plan import DraftLadder
from flexspec.errors import RequestError
from flexspec.runtime.engine.api import Delta
from flexspec.runtime.engine.complete import Completion, complete, stream
from flexspec.runtime.engine.engine import Engine
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.text.chat import ChatRenderer
from flexspec.runtime.text.tokenizer import Tokenizer
from flexspec.sampling import SamplingParams

Prompt = str | Sequence[int]  # a text to continue, or token ids
Messages = Sequence[Mapping[str, str]]  # a chat: {"role": ..., "content": ...}, oldest first
Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, one each, or the defaults


@dataclass(slots=True)
class Served:
    """An engine, and what its callers need besides."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatRenderer | None
    plan: Plan
    draft: DraftLadder
    isa: str  # instruction set or GPU architecture of its kernels
    context_tokens: int
    executors: list[Executor]

    def close(self) -> None:
        """Cancel running requests and free all memory. Idempotent."""
        self.engine.stop()
        executors, self.executors = self.executors, []
        for executor in executors:
            executor.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. A text gets the tokens that begin a document (BOS), if the model has any."""
        return self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)

    def chat_prompt(self, messages: Messages) -> str:
        """The text that asks for the assistant's next turn. Raises RequestError for a model without chat template."""
        if self.chat is None:
            raise RequestError(f"a chat for {self.name}, which has no chat template", "a prompt", "use generate")
        return self.chat.render(messages)

    def question(self, text: str) -> str:
        """The prompt of a single question: a chat if the model has a template, else the text itself."""
        return text if self.chat is None else self.chat_prompt([{"role": "user", "content": text}])

    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]:
        """Run all prompts together, in the calling thread. Raises as runtime/engine/complete.py: complete."""
        ids = [self.encode(prompt) for prompt in prompts]
        done = complete(self.engine, ids, _one_each(params, len(ids)))
        texts = (prompt if isinstance(prompt, str) else None for prompt in prompts)
        return [replace(completion, prompt=text) for completion, text in zip(done, texts, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The deltas of one prompt as they are committed. Raises as runtime/engine/complete.py: stream."""
        return stream(self.engine, self.encode(prompt), params or SamplingParams())


def _one_each(params: Params, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts", "one for all, or one each", "pass as many"
        )
    return params
