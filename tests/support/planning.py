"""Small planning problems for tests: tiny models, and random machines made of plain numbers."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

from flexspec.compiler.prices.acceptance_profile import DraftEntry
from flexspec.compiler.prices.machine import Constant, Device, Link, Machine, NodeKind
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.profile import ModelProfile, profile_model
from flexspec.draft_plan import DraftPlan
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.types import DType

DEGREES = (1, 2, 4)
CONFIGS = {
    "gqa": ModelConfig("llama", 512, 64, 2, 8, 2, 8, 160, 1e-5, 256),
    "mha": ModelConfig("llama", 256, 48, 2, 4, 4, 12, 96, 1e-5, 256, tied_embeddings=True),
    "ragged": ModelConfig("qwen2", 300, 36, 2, 9, 3, 4, 100, 1e-5, 256, qkv_bias=True),
    "ssm": ModelConfig("llama", 256, 32, 2, 2, 1, 16, 64, 1e-5, 256),
}
ENTRIES = (
    DraftEntry(DraftPlan.parse("chain:3"), (1.0, 1.0, 1.0), 1.9, (2.0, 1.0, 1.0)),
    DraftEntry(DraftPlan.parse("tree:2,2"), (2.0, 4.0), 2.1, (3.0, 2.0)),
    DraftEntry(DraftPlan.parse("tree:4,2,2"), (4.0, 8.0, 16.0), 2.6, (3.0, 4.0, 8.0)),
)


@functools.cache
def tiny_profile(name: str, *, ssm: bool = False) -> ModelProfile:
    return profile_model(name, CONFIGS[name], DType.BF16, build_model, degrees=() if ssm else DEGREES, ssm=ssm)


def with_layers(profile: ModelProfile, layers: int) -> ModelProfile:
    return replace(profile, config=replace(profile.config, layers=layers))


def constant(value: float) -> Constant:
    return Constant(value, 1.0, "test")


def make_device(
    name: str = "d", memory_bytes: float = 1e9, bandwidth: float = 1e9, flops: float = 1e12, launch_us: float = 1.0
) -> Device:
    return Device(
        name, constant(memory_bytes), constant(1e3), constant(bandwidth), constant(flops), constant(flops / 4),
        constant(launch_us),
    )  # fmt: skip


def make_link(name: str = "l", alpha_us: float = 1.0, bandwidth: float = 1e9) -> Link:
    return Link(name, constant(alpha_us), constant(bandwidth))


def make_machine(*kinds: NodeKind, network: Link | None = None, round_us: float = 5.0) -> Machine:
    return Machine("test", "test", kinds, network or make_link("net", 5.0, 5e8), constant(round_us), constant(1.0))


def random_problem(seed: int) -> Problem:
    """A problem whose space is small enough to be enumerated in a moment, with memory that often binds."""
    chance = random.Random(seed)
    llm = with_layers(tiny_profile(chance.choice(["gqa", "mha", "ragged"])), chance.randint(1, 5))
    ssms = tuple(tiny_profile("ssm", ssm=True) for _ in range(chance.choice([0, 1, 1, 1, 2])))
    kinds = []
    for i in range(chance.choice([1, 1, 2])):
        device = make_device(
            f"d{i}",
            memory_bytes=llm.weight_bytes() * chance.uniform(0.3, 3.0) + 2e5,
            bandwidth=10 ** chance.uniform(8, 10),
            flops=10 ** chance.uniform(10, 13),
            launch_us=chance.choice([0.0, 0.5, 3.0]),
        )
        link = make_link(f"l{i}", chance.choice([0.0, 1.0, 20.0]), 10 ** chance.uniform(8, 10))
        kinds.append(NodeKind(device, chance.choice([1, 2, 3, 4]), link, chance.choice([1, 1, 2])))
    network = make_link("net", chance.choice([1.0, 10.0, 100.0]), 10 ** chance.uniform(7, 10))
    objective = chance.choice(["latency", "throughput", "goodput"])
    return Problem(
        make_machine(*kinds, network=network, round_us=chance.choice([0.0, 5.0, 50.0])),
        llm,
        ssms,
        ENTRIES[: chance.randint(1, 3)],
        requests=chance.choice([1, 2, 4, 6]),
        context_tokens=chance.choice([32, 128]),
        objective=objective,
        limit_us=10 ** chance.uniform(1, 4) if objective == "goodput" else float("inf"),
        degrees=DEGREES,
    )
