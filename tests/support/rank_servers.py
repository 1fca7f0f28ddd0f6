"""A tiny model compiled for plans of several ranks, what one rank writes with it, and the processes of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from artifacts import PLAN, VOCAB
from built_once import built_once
from tiny_models import random_weights, write_gguf, write_huggingface

from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.sampling import SamplingParams
from flexspec.types import DType

STAGES = {
    "tp2": (Stage(0, 2, (0, 1)),),
    "pp2": (Stage(0, 1, (0,)), Stage(1, 2, (1,))),
    "ragged": (Stage(0, 1, (2, 0)), Stage(1, 2, (1,))),
}
OPTIONS = ("--threads", "1", "--kv-tokens", "2048", "--no-checks")
PROMPTS = ["hello 12 hello", "the world 12 12", "é 🎉 hello", "x"]
LADDER = DraftLadder.of(DraftPlan.parse(PLAN))
PLANS = {name: Plan(stages, ((0,),), LADDER, "hand") for name, stages in STAGES.items()}
TIMEOUT_S = 120.0  # for a busy machine; nothing waits for it
ENDS_WITHIN_S = 5.0


def artifacts_for_ranks(plans: Mapping[str, Plan], draft: DraftPlan) -> Path:
    """A folder with NAME.fspec for each plan: one LLM, and an SSM that is the same model (its drafts are accepted).

    Compiled once for all tests: for reading only.
    """
    options = CompileOptions(DType.F32, isas=supported_isas()[:1], draft=draft)

    def make(folder: Path) -> None:
        llm = write_gguf(folder / "tiny.gguf", random_weights(VOCAB))
        ssm = write_huggingface(folder / "ssm", random_weights(VOCAB))
        for name, plan in plans.items():
            out = folder / f"{name}.fspec"
            compile_model(llm, [ssm], out, replace(options, plan=plan), argv=["flexspec", "compile"])

    return built_once("ranks", (options, sorted(plans.items())), make)


def texts_of_one_rank(artifact: Path, asked: Sequence[tuple[str, SamplingParams]]) -> list[str]:
    """What one rank answers without speculation."""
    served = open_engine(artifact, ServeOptions(draft="off", threads=1, kv_tokens=2048, measure=False))
    texts = [served.generate([prompt], params)[0].text for prompt, params in asked]
    served.close()
    return texts


def rank_processes(launcher: int) -> dict[int, int]:
    """Process of each rank, by the environment that the launcher gave it."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found: dict[int, int] = {}
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found.update({int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")})
    return found


def is_running(process: int) -> bool:
    """Whether a process is there that has not ended; one that has may wait for its new parent to notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
