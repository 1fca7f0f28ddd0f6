"""Training on a tiny random corpus: it learns, resumes to the bit, and measures what it claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flexspec.errors import TuneError
from flexspec.models.config import ModelConfig
from flexspec.ops.rope import rope_tables
from flexspec.runtime.tune.batches import draw_sub_vocabulary, padded_length, plan_batches
from flexspec.runtime.tune.config import TrainConfig, TuneConfig
from flexspec.runtime.tune.corpus import Conversation, frequent_tokens
from flexspec.runtime.tune.evaluate import TOP, hit_rates, true_ranks
from flexspec.runtime.tune.model import FusedStateNet, Weights, ssm_config, weight_shapes
from flexspec.runtime.tune.train import Teacher, Trainer, id_tensor, learning_rate
from flexspec.weight_formats.bf16 import to_bf16_bits

LLM = ModelConfig("llama", 40, 16, 2, 2, 1, 8, 24, 1e-5, 64, tied_embeddings=True)
CONFIG = TrainConfig(
    epochs=6, batch_tokens=120, max_tokens=30, learning_rate=3e-3, warmup_steps=3, frequent=10, sampled=6,
    checkpoint_steps=5,
)  # fmt: skip


def _table() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((LLM.vocab_size, LLM.hidden_size)).astype(np.float32)


def _corpus(count: int = 40) -> list[Conversation]:
    """Conversations that count upwards modulo the vocabulary; the last state points at the next token."""
    rng = np.random.default_rng(1)
    table, made = _table(), []
    for index in range(count):
        ids = (rng.integers(0, 40) + np.arange(int(rng.integers(12, 40)))) % 40
        last = table[(ids + 1) % 40]
        states = to_bf16_bits(np.concatenate([table[ids], last], 1))
        made.append(Conversation(index, "free", 0.8 if index % 3 else 0.0, 5, ids.astype(np.int32), states))
    return made


def _parts(corpus: list[Conversation]) -> tuple[FusedStateNet, Teacher, Weights]:
    config = ssm_config(LLM)
    rope = {"theta": 1e4, "kind": "default", "factor": 1.0}
    cos, sin = rope_tables(rope, LLM.head_dim, 64)
    net = FusedStateNet(config, 2, (torch.from_numpy(cos), torch.from_numpy(sin)))
    torch.manual_seed(0)
    start = {
        name: torch.randn(s) * 0.2 if len(s) > 1 else torch.ones(s) for name, s in weight_shapes(config, 2).items()
    }
    table = torch.from_numpy(_table()).to(torch.bfloat16)
    return net, Teacher(table, table, id_tensor(frequent_tokens(corpus, 40, 32))), start


def _quiet(done: int, total: int, detail: str) -> None:
    assert 0 < done <= total and detail


@pytest.mark.slow(reason="trains twice")
def test_training_learns_and_resumes_to_the_bit(tmp_path: Path) -> None:
    corpus = _corpus()
    net, teacher, start = _parts(corpus)
    straight = Trainer(net, start, teacher, corpus, CONFIG, tmp_path / "a")
    before = hit_rates(net, start, teacher, corpus)
    weights = straight.run(_quiet)
    after = hit_rates(net, weights, teacher, corpus)
    assert straight.losses[-1] < 0.85 * straight.losses[straight.steps // 2]
    assert after.hits[0][0] > before.hits[0][0] + 0.2 and after.hits[2][1] > before.hits[2][1]

    for until in (7, 11, None):  # a run that is started three times; a checkpoint stands where each stopped
        resumed = Trainer(net, start, teacher, corpus, CONFIG, tmp_path / "b")
        final = resumed.run(_quiet, until=until)
    assert resumed.losses == straight.losses and resumed.trained_tokens == straight.trained_tokens
    assert all(torch.equal(final[name], weights[name]) for name in weights)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    corpus = _corpus(8)
    net, teacher, start = _parts(corpus)
    Trainer(net, start, teacher, corpus, CONFIG, tmp_path).run(_quiet, until=1)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TuneError, match=r"delete checkpoint\.pt"):
        Trainer(net, start, teacher, corpus, CONFIG, tmp_path)


def test_no_conversations_and_bad_loss_are_errors(tmp_path: Path) -> None:
    corpus = _corpus(8)
    net, teacher, start = _parts(corpus)
    with pytest.raises(TuneError, match="no conversations"):
        Trainer(net, start, teacher, [], CONFIG, tmp_path)
    broken = {**start, "norm.weight": start["norm.weight"] * float("nan")}
    with pytest.raises(TuneError, match="a loss of nan at step 0"):
        Trainer(net, broken, teacher, corpus, CONFIG, tmp_path).run(_quiet)


def test_hit_rates_against_a_loop_over_positions() -> None:
    corpus = _corpus(5)
    net, teacher, weights = _parts(corpus)
    rates = hit_rates(net, weights, teacher, corpus, depths=3, max_tokens=64, compute=torch.float32)
    table, kept = teacher.embedding_VE.float(), teacher.keep_ids.tolist()
    for depth in range(3):
        found = []
        for c in corpus:
            states = torch.from_numpy(c.states.view(np.int16).copy()).view(torch.bfloat16).float().view(1, -1, 2, 16)
            outs = net.unroll(weights, table[c.ids[1:]][None], states[:, :-1], 3)
            for position in range(c.prompt_tokens + depth, len(c.ids)):
                law = table[teacher.keep_ids] @ outs[depth][0, position - depth - 2]
                order = [kept[i] for i in law.argsort(descending=True).tolist()]
                found.append(order.index(c.ids[position]) if c.ids[position] in order else 99)
        assert rates.hits[depth] == pytest.approx([np.mean([f < k for f in found]) for k in TOP], abs=1e-4)
    assert rates.tokens == sum(len(c.answer) for c in corpus) and 0 < rates.coverage < 1


def test_ranks_put_unknown_tokens_last() -> None:
    ranks = true_ranks(torch.eye(3), torch.tensor([[3.0, 0, 0], [1, 9, 0], [2, 1, 5]]), torch.tensor([0, -1, 0]))
    assert ranks.tolist() == [0, 3, 1]


def test_batches_hold_every_conversation_once_an_epoch() -> None:
    lengths = [3 + (37 * i) % 160 for i in range(90)]
    config = replace(CONFIG, epochs=2.5, batch_tokens=300, max_tokens=128)
    plan = plan_batches(lengths, config)
    for group in plan:
        padded = {padded_length(min(lengths[i], config.max_tokens)) for i in group.tolist()}
        assert len(padded) == 1 and len(group) * padded.pop() <= config.batch_tokens
    flat = np.concatenate(plan).tolist()
    epoch = len(lengths)
    assert sorted(flat[:epoch]) == sorted(flat[epoch : 2 * epoch]) == list(range(epoch))
    assert 0.3 * epoch < len(flat) - 2 * epoch < 0.7 * epoch
    assert plan_batches([1000], replace(config, max_tokens=1000))[0].tolist() == [0]  # longer than a batch: alone
    assert padded_length(64) == 64 and padded_length(65) == 96 and padded_length(1100) == 1280


def test_sub_vocabulary_holds_targets_and_stands_for_the_rest() -> None:
    targets = torch.tensor([0, 12, 31, -1, 12])
    drawn = draw_sub_vocabulary(targets, 32, CONFIG, torch.Generator().manual_seed(0))
    columns = drawn.columns_U.tolist()
    assert set(range(10)) | {12, 31} <= set(columns) and len(set(columns)) == len(columns)
    assert drawn.column_of[targets].tolist()[3] == -1
    assert [columns[i] for i in drawn.column_of[torch.tensor([0, 12, 31])]] == [0, 12, 31]
    sampled = len(columns) - 12
    assert torch.allclose(drawn.shift_U[-sampled:].exp() * sampled, torch.full((sampled,), 20.0))
    assert not drawn.shift_U[:12].any()


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [learning_rate(step, 100, CONFIG) for step in range(101)]
    assert rates[0] < rates[1] < rates[2] and rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[100] == pytest.approx(CONFIG.learning_rate * CONFIG.final_rate)


def test_settings_that_cannot_fit_are_refused_and_keys_tell_runs_apart() -> None:
    config = TuneConfig()
    config.check(30, 49152)
    for bad in (replace(config, tap_layers=(18, 8)), replace(config, tap_layers=(30,)), replace(config, tap_layers=())):
        with pytest.raises(TuneError, match="tap layers"):
            bad.check(30, 49152)
    with pytest.raises(TuneError, match="reduced vocabulary"):
        replace(config, reduced_vocab_size=50_000).check(30, 49152)
    longer = replace(config, generate=replace(config.generate, shards=99, batch=7))
    assert longer.generate_key("m") == config.generate_key("m") != config.generate_key("n")
    assert longer.train_key("m") != config.train_key("m")
    hotter = replace(config, train=replace(config.train, learning_rate=1.0))
    assert hotter.generate_key("m") == config.generate_key("m") and hotter.train_key("m") != config.train_key("m")
