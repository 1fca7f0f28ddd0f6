"""Runs prompts through an artifact with speculation off and on, interleaved, and pairs the results.

Shared by the demo and the benchmark. Rates are decode rates (tokens after the first over the time after the first
token); the prefill is the same work either way and is reported separately.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flexspec.runtime.engine.complete import Completion
from flexspec.runtime.engine.round import Clock
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.open.served import Served
from flexspec.sampling import SamplingParams

Note = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt without and with speculation."""

    off: Completion
    on: Completion

    @property
    def identical(self) -> bool:
        return self.off.token_ids == self.on.token_ids

    @property
    def ratio(self) -> float:
        """Decode time off over on; 1 when an answer is too short to have any."""
        return self.off.stats.decode_s / self.on.stats.decode_s if self.on.stats.decode_s > 0 else 1.0

    @property
    def total_ratio(self) -> float:
        """The same with the prefill included."""
        off, on = self.off.stats, self.on.stats
        return (off.prefill_s + off.decode_s) / (on.prefill_s + on.decode_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs of a run, and where the speculative engine's time went."""

    pairs: tuple[Pair, ...]
    clock: Clock

    @property
    def overhead_share(self) -> float:
        """Python between steps (accept, commit, pack, schedule) over the whole time of the rounds."""
        return self.clock.overhead_s / self.clock.total_s

    @property
    def ratio(self) -> float:
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def off_tokens_per_s(self) -> float:
        return pooled_rate([pair.off for pair in self.pairs])

    @property
    def on_tokens_per_s(self) -> float:
        return pooled_rate([pair.on for pair in self.pairs])

    @property
    def tokens_per_round(self) -> float:
        return pooled_tokens_per_round([pair.on for pair in self.pairs])

    @property
    def nodes_per_round(self) -> float:
        rounds = sum(pair.on.stats.rounds for pair in self.pairs)
        return sum(pair.on.stats.drafted + pair.on.stats.rounds for pair in self.pairs) / max(1, rounds)

    @property
    def identical_share(self) -> float:
        return sum(pair.identical for pair in self.pairs) / len(self.pairs)


def pooled_rate(answers: Sequence[Completion]) -> float:
    """All tokens over all seconds: a mean of rates would weigh a short answer like a long one."""
    seconds = sum(a.stats.decode_s for a in answers)
    return sum(a.stats.completion_tokens - 1 for a in answers) / seconds if seconds else 0.0


def pooled_tokens_per_round(answers: Sequence[Completion]) -> float:
    rounds = sum(a.stats.rounds for a in answers)
    return sum(a.stats.completion_tokens - 1 for a in answers) / rounds if rounds else 0.0


def answer(served: Served, prompt: str, params: SamplingParams) -> Completion:
    """Run one prompt alone, through the chat template when the model has one."""
    return answer_all(served, [prompt], params)[0]


def answer_all(served: Served, prompts: Sequence[str], params: SamplingParams) -> list[Completion]:
    """Run prompts together (continuous batching), in order."""
    return served.generate([served.question(prompt) for prompt in prompts], params)


def compare(
    artifact: Path,
    prompts: Sequence[str],
    max_tokens: int,
    options: ServeOptions | None = None,
    note: Note = lambda done, of: None,
) -> Comparison:
    """Each prompt off then on, so that slow moments of the machine affect both. Greedy."""
    options = options or ServeOptions()
    off = open_engine(artifact, replace(options, draft="off"))
    on = open_engine(artifact, options)
    params = SamplingParams(max_tokens=max_tokens)
    try:
        warm = SamplingParams(max_tokens=4)
        answer(off, prompts[0], warm)
        answer(on, prompts[0], warm)
        before = replace(on.engine.clock)
        pairs = []
        for i, prompt in enumerate(prompts):
            pairs.append(Pair(answer(off, prompt, params), answer(on, prompt, params)))
            note(i + 1, len(prompts))
        spent = {name: value - getattr(before, name) for name, value in asdict(on.engine.clock).items()}
        return Comparison(tuple(pairs), Clock(**spent))
    finally:
        off.close()
        on.close()
