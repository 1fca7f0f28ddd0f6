"""Self-generation on a tiny random model: independence of batching, resume after a kill, the shape of conversations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexspec.errors import CapacityError, TuneError
from flexspec.models.config import ModelConfig
from flexspec.models.llama import build_llama
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.tune.config import GenerateConfig
from flexspec.runtime.tune.corpus import read_corpus, read_shard, split
from flexspec.runtime.tune.generate import Generator, sample
from flexspec.runtime.tune.prompts import OPENINGS, ChatFrame, Text, plan_prompt
from flexspec.types import DType, Role
from flexspec.weight_formats.bf16 import to_bf16_bits

pytestmark = pytest.mark.slow(reason="generates with torch")

MODEL = ModelConfig("llama", 96, 16, 2, 2, 1, 8, 24, 1e-5, 512, tied_embeddings=True, eos_ids=(2,))
FRAME = ChatFrame("<u>", "\x02\n<a>")
CONFIG = GenerateConfig(
    shards=4, shard_size=6, batch=5, max_invented_tokens=6, max_passage_tokens=9, max_prompt_tokens=90,
    max_answer_tokens=8, task_share=0.5,
)  # fmt: skip


class Letters:
    """One token a character; id 2 is the end of a turn."""

    def encode(self, text: str, add_special: bool) -> list[int]:
        return [2 if char == "\x02" else 3 + ord(char) % 93 for char in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(33 + i) for i in ids if i != 2) * 30  # long enough to become material for tasks


def _executor() -> ReferenceExecutor:
    graph = build_llama(MODEL, DType.F32, taps=(1,))
    rng = np.random.default_rng(0)
    weights = {v.name: rng.standard_normal(v.type.dims).astype(np.float32) for v in graph.inputs_of(Role.WEIGHT)}
    return ReferenceExecutor(graph, weights, 40, 128)


def _generate(folder: Path, config: GenerateConfig = CONFIG, executor: ReferenceExecutor | None = None) -> None:
    generator = Generator(executor or _executor(), Letters(), FRAME, (2,), config, folder, 4, 32)
    generator.run(lambda done, total, detail: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    _generate(folder)
    return folder


def test_conversations_have_the_shape_of_the_chat(made: Path) -> None:
    conversations = [c for shard in range(4) for c in read_shard(made, shard)]
    assert [c.index for c in conversations] == list(range(24))
    before, after = Letters().encode(FRAME.before, True), Letters().encode(FRAME.after, False)
    assert {c.kind.endswith("+") for c in conversations} == {True, False}
    for c in conversations:
        assert c.prompt.tolist()[:3] == before and c.prompt.tolist()[-len(after) :] == after
        assert 1 <= len(c.answer) <= CONFIG.max_answer_tokens and len(c.prompt) <= CONFIG.max_prompt_tokens
        assert 2 not in c.answer[:-1] and (c.answer[-1] == 2 or len(c.answer) == CONFIG.max_answer_tokens)
        assert c.states.shape == (len(c.ids), 32) and not c.states[-1].any() and c.states[:-1].any(1).all()
    train, held_out = split(read_corpus(made, 4), 4)
    assert {c.index % 4 for c in held_out} == {3} and not {c.index % 4 for c in train} & {3}


def test_greedy_answers_and_states_are_the_model_s(made: Path) -> None:
    greedy = [c for c in read_shard(made, 3) if c.temperature == 0.0]
    assert greedy
    for c in greedy:
        n = len(c.ids) - 1
        result = _executor().step(
            StepBatch(
                c.ids[:-1], np.arange(n, dtype=np.int32), np.array([0, n], np.int32), np.zeros(1, np.int32),
                np.ones(1, np.uint8), np.arange(4, dtype=np.int32)[None], np.zeros((n, 1), np.uint64),
                np.arange(n, dtype=np.int32),
            ),
            want_logits=False,
        )  # fmt: skip
        assert result.argmax_L[c.prompt_tokens - 1 :].tolist() == c.answer.tolist()
        assert result.features_TE is not None
        assert np.abs(c.states[:-1].astype(int) - to_bf16_bits(result.features_TE)).max() <= 1  # one bf16 unit


def test_batch_size_does_not_change_the_text(made: Path, tmp_path: Path) -> None:
    _generate(tmp_path, replace(CONFIG, batch=2))
    for shard in range(4):
        for a, b in zip(read_shard(made, shard), read_shard(tmp_path, shard), strict=True):
            assert a.ids.tolist() == b.ids.tolist() and a.kind == b.kind


class _Killed(Exception):
    pass


class _Fragile(ReferenceExecutor):
    steps = 0

    def step(self, batch: StepBatch, *, want_logits: bool) -> StepResult:
        self.steps += 1
        if self.steps > 60:
            raise _Killed
        return super().step(batch, want_logits=want_logits)


def test_a_killed_run_goes_on_and_ends_the_same(made: Path, tmp_path: Path) -> None:
    fragile = _executor()
    fragile.__class__ = _Fragile
    with pytest.raises(_Killed):
        _generate(tmp_path, executor=fragile)
    assert 0 < len(list(tmp_path.glob("*.npz"))) < 4
    _generate(tmp_path)
    for path in sorted(made.iterdir()):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_pool_too_small_is_refused(tmp_path: Path) -> None:
    executor = _executor()
    executor.pages = 4
    with pytest.raises(CapacityError, match="4 KV pages"):
        _generate(tmp_path, executor=executor)


def test_a_damaged_shard_is_named(made: Path, tmp_path: Path) -> None:
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: -200 if path.name == "shard-00001.npz" else None])
    assert read_shard(tmp_path, 0)
    with pytest.raises(TuneError, match=r"shard 1 .* delete shard-00001.npz"):
        read_shard(tmp_path, 1)


def test_sampling_follows_the_law_above_the_floor() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.1996, 0.0004], np.float32))
    grid = (np.arange(10_000) + 0.5) / 10_000
    drawn = np.bincount([sample(logits, 1.0, 0.01, u) for u in grid], minlength=4) / len(grid)
    np.testing.assert_allclose(drawn, [0.5002, 0.3001, 0.1997, 0.0], atol=2e-4)
    assert sample(logits, 1.0, 0.01, 0.999999999999) == 2


def test_plans_depend_on_index_and_seed_only() -> None:
    texts = [Text(f"question {i}", f"answer {i}. More of it.") for i in range(9)]
    plans = [plan_prompt(i, CONFIG, texts) for i in range(400)]
    assert plans == [plan_prompt(i, CONFIG, texts) for i in range(400)]
    assert plans != [plan_prompt(i, replace(CONFIG, seed=1), texts) for i in range(400)]
    assert {p.kind for p in plans if p.invented_tokens} == set(OPENINGS)
    greedy = sum(p.answer_temperature == 0.0 for p in plans) / len(plans)
    assert abs(greedy - CONFIG.greedy_share) < 0.08
    assert all(plan_prompt(i, CONFIG, []).invented_tokens for i in range(50))
