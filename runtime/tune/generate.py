"""Self-generated conversations: the LLM invents a user turn and answers it, while its hidden states are recorded.

One continuous batch: a sequence that ends makes room for the next. Inventing and answering happen in the same sequence,
so no token is computed twice. Each conversation draws from its own random stream and the executor is row-invariant, so
neither batch size nor an interruption changes a byte.

Shape letters: T rows of a step, L logit rows, V vocab, B pages of a sequence, J taps, E hidden.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexspec.arithmetic import ceil_div
from flexspec.errors import CapacityError
from flexspec.runtime.executors.step import Executor, StepBatch, StepResult
from flexspec.runtime.tune.config import GenerateConfig
from flexspec.runtime.tune.corpus import (
    Conversation,
    is_held_out,
    read_shard,
    shard_exists,
    write_shard,
)
from flexspec.runtime.tune.prompts import ChatFrame, PromptPlan, Text, plan_prompt
from flexspec.types import PAGE_TOKENS
from flexspec.weight_formats.bf16 import to_bf16_bits

Report = Callable[[int, int, str], None]  # (done, total, detail)
_LAG = 2  # a shard's tasks build on texts of shards at least so far behind, so that neighbours overlap in one batch
_MIN_TEXT = 120  # characters an answer needs to become material for a task


class Codec(Protocol):
    """The part of a tokenizer that this file uses."""

    def encode(self, text: str, add_special: bool) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(slots=True)
class _Sequence:
    """One conversation in progress."""

    index: int
    plan: PromptPlan
    ids: list[int]
    turn_start: int
    fed: int
    prompt_tokens: int  # 0 while the user turn is still being invented
    pages: NDArray[np.int32]
    states: NDArray[np.uint16]
    rng: random.Random

    @property
    def pending(self) -> int:
        return len(self.ids) - self.fed

    @property
    def temperature(self) -> float:
        return self.plan.answer_temperature if self.prompt_tokens else 1.0

    def min_p(self, config: GenerateConfig) -> float:
        return config.answer_min_p if self.prompt_tokens else config.invent_min_p


def sample(logits_V: NDArray[np.float32], temperature: float, min_p: float, uniform: float) -> int:
    """A token at ``temperature`` > 0 among those with at least ``min_p`` of the likeliest one's chance."""
    peak = float(logits_V.max())
    tokens = np.flatnonzero(logits_V >= peak + temperature * math.log(min_p))
    weights = np.exp((logits_V[tokens].astype(np.float64) - peak) / temperature)
    chosen = int(np.searchsorted(np.cumsum(weights), uniform * float(weights.sum()), side="right"))
    return int(tokens[min(chosen, len(tokens) - 1)])


def step_batch(parts: Sequence[tuple[_Sequence, int]]) -> StepBatch:
    """The step that feeds the next ``rows`` ids of each sequence, all as chains. Sequences whose last known id is fed
    have a logit row."""
    rows = np.array([n for _, n in parts])
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    table = np.zeros((len(parts), max(len(s.pages) for s, _ in parts)), np.int32)
    for r, (s, _) in enumerate(parts):
        table[r, : len(s.pages)] = s.pages
    return StepBatch(
        ids_T=np.concatenate([s.ids[s.fed : s.fed + n] for s, n in parts]).astype(np.int32),
        positions_T=np.concatenate([np.arange(s.fed, s.fed + n) for s, n in parts]).astype(np.int32),
        starts_R1=starts,
        contexts_R=np.array([s.fed for s, _ in parts], np.int32),
        causal_R=np.ones(len(parts), np.uint8),
        page_table_RB=table,
        ancestors_TW=np.zeros((int(starts[-1]), 1), np.uint64),
        logit_rows_L=np.array([starts[r + 1] - 1 for r, (s, n) in enumerate(parts) if n == s.pending], np.int32),
    )


class Generator:
    """Fills a folder with the shards of a configuration; shards already there are kept.

    ``state_width`` is J*E. Raises CapacityError if the executor's pool cannot hold one conversation.
    """

    def __init__(
        self, executor: Executor, codec: Codec, frame: ChatFrame, eos_ids: Sequence[int], config: GenerateConfig,
        folder: Path, held_out_every: int, state_width: int,
    ) -> None:  # fmt: skip
        self._executor, self._codec, self._frame, self._config = executor, codec, frame, config
        self._folder, self._held_out_every, self._state_width = folder, held_out_every, state_width
        self._after = codec.encode(frame.after, False)
        self._eos = frozenset(eos_ids)
        self._free = list(range(executor.pages - 1, -1, -1))
        self._texts: list[list[Text]] = []
        longest = config.max_prompt_tokens + config.max_answer_tokens
        if self._pages_for(longest) * 2 > executor.pages or longest > executor.max_positions:
            raise CapacityError(
                f"{executor.pages} KV pages and {executor.max_positions} positions",
                f"room for two conversations of {longest} tokens", "lower the prompt and answer lengths",
            )  # fmt: skip
        self._before_tokens = len(codec.encode(frame.before, True))

    def run(self, report: Report) -> None:
        """Generate every missing shard; ``report`` gets conversations done, the total, and tokens generated so far."""
        size = self._config.shard_size
        missing = [s for s in range(self._config.shards) if not shard_exists(self._folder, s)]
        done = size * (self._config.shards - len(missing))
        queue = [index for s in missing for index in range(s * size, (s + 1) * size)]
        finished: dict[int, list[Conversation]] = {s: [] for s in missing}
        active: list[_Sequence] = []
        tokens = 0
        while queue or active:
            while queue and len(active) < self._config.batch and self._may_admit(queue[0]):
                active.append(self._admit(queue.pop(0)))
            for sequence in self._step(active):
                active.remove(sequence)
                self._free.extend(sequence.pages.tolist())
                shard = sequence.index // size
                finished[shard].append(self._close(sequence))
                tokens += len(sequence.ids) - sequence.prompt_tokens
                done += 1
                report(done, size * self._config.shards, f"{tokens} answer tokens")
                if len(finished[shard]) == size:
                    write_shard(self._folder, shard, sorted(finished.pop(shard), key=lambda c: c.index))

    def _pages_for(self, tokens: int) -> int:
        return ceil_div(tokens, PAGE_TOKENS)

    def _sequence(self, index: int, plan: PromptPlan, ids: list[int], room: int) -> _Sequence:
        pages = [self._free.pop() for _ in range(self._pages_for(len(ids) + room))]
        return _Sequence(
            index, plan, ids, 0, 0, 0, np.array(pages, np.int32),
            np.zeros((len(ids) + room, self._state_width), np.uint16),
            random.Random(f"text/{self._config.seed}/{index}"),
        )  # fmt: skip

    def _may_admit(self, index: int) -> bool:
        """Whether there are pages for the longest conversation, and the shards its task may build on are finished."""
        needed = self._pages_for(self._config.max_prompt_tokens + self._config.max_answer_tokens)
        behind = index // self._config.shard_size - _LAG
        return len(self._free) >= needed and all(shard_exists(self._folder, s) for s in range(behind + 1))

    def _earlier(self, index: int) -> list[Text]:
        """Texts of the shards at least ``_LAG`` behind, without held-out conversations."""
        behind = max(0, index // self._config.shard_size - _LAG + 1)
        while len(self._texts) < behind:
            self._texts.append([
                Text(self._turn_text(c), self._codec.decode(c.answer.tolist()).strip())
                for c in read_shard(self._folder, len(self._texts))
                if not is_held_out(c.index, self._held_out_every) and not c.kind.endswith("+")
            ])  # fmt: skip
        return [text for shard in self._texts[:behind] for text in shard if len(text.answer) >= _MIN_TEXT]

    def _turn_text(self, conversation: Conversation) -> str:
        """The user's text of a finished prompt."""
        ids = conversation.prompt.tolist()
        return self._codec.decode(ids[self._before_tokens : len(ids) - len(self._after)]).strip()

    def _admit(self, index: int) -> _Sequence:
        config = self._config
        plan = plan_prompt(index, config, self._earlier(index))
        text = plan.text.rstrip(" ") if plan.invented_tokens else plan.text
        room = config.max_prompt_tokens - plan.invented_tokens - len(self._after)
        ids = self._codec.encode(self._frame.before + text, True)[:room]
        longest = plan.invented_tokens + len(self._after) + config.max_answer_tokens
        turn_start = len(ids)
        if not plan.invented_tokens:
            ids += self._after
        sequence = self._sequence(index, plan, ids, longest)
        sequence.turn_start = turn_start
        sequence.prompt_tokens = 0 if plan.invented_tokens else len(ids)
        return sequence

    def _step(self, active: Sequence[_Sequence]) -> list[_Sequence]:
        """Run one step over all sequences (shortest pending first, up to the row limit); return those that ended."""
        parts: list[tuple[_Sequence, int]] = []
        room = self._executor.max_rows
        for sequence in sorted(active, key=lambda s: s.pending):
            rows = min(sequence.pending, room)
            if rows:
                parts.append((sequence, rows))
                room -= rows
        sampled = any(n == s.pending and s.temperature > 0 for s, n in parts)
        batch = step_batch(parts)
        result = self._executor.step(batch, want_logits=sampled)
        assert result.features_TE is not None, "the LLM graph is built with taps"
        states = to_bf16_bits(np.ascontiguousarray(result.features_TE, np.float32))
        ended: list[_Sequence] = []
        logit_row = 0
        for r, (sequence, rows) in enumerate(parts):
            complete = rows == sequence.pending
            start = int(batch.starts_R1[r])
            sequence.states[sequence.fed : sequence.fed + rows] = states[start : start + rows]
            sequence.fed += rows
            if complete:
                if self._extend(sequence, self._choose(sequence, result, logit_row)):
                    ended.append(sequence)
                logit_row += 1
        return ended

    def _choose(self, sequence: _Sequence, result: StepResult, row: int) -> int:
        if sequence.temperature == 0:
            return int(result.argmax_L[row])
        assert result.logits_LV is not None
        return sample(result.logits_LV[row], sequence.temperature, sequence.min_p(self._config), sequence.rng.random())

    def _extend(self, sequence: _Sequence, token: int) -> bool:
        """Append a token by the rules of the sequence's phase; True when the conversation is complete."""
        if sequence.prompt_tokens:
            sequence.ids.append(token)
            length = len(sequence.ids) - sequence.prompt_tokens
            return token in self._eos or length >= self._config.max_answer_tokens
        if token in self._eos or token == self._after[0]:
            sequence.ids += self._after
        else:
            sequence.ids.append(token)
            if len(sequence.ids) - sequence.turn_start < sequence.plan.invented_tokens:
                return False
            sequence.ids += self._after
        sequence.prompt_tokens = len(sequence.ids)
        return False

    def _close(self, sequence: _Sequence) -> Conversation:
        """The finished conversation. The last token was chosen but never fed: its state is zeros."""
        kind = sequence.plan.kind + ("" if sequence.plan.invented_tokens else "+")
        n = len(sequence.ids)
        return Conversation(
            sequence.index, kind, sequence.plan.answer_temperature, sequence.prompt_tokens,
            np.array(sequence.ids, np.int32), sequence.states[:n].copy(),
        )  # fmt: skip
