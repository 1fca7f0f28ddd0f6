"""Ranks on Triton kernels: the parts of a plan in the interpreter, over gloo, answer as one CPU does."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from commands import flexspec, serving

from benchmarks import gpu_serve
from flexspec.kernels.cpu.build import supported_isas

pytestmark = pytest.mark.ranks

PLANS = {
    "tensor": 'ssm = "all"\ndraft = "tree:2,2,1"\n[[stages]]\nblocks = 2\ndevices = [0, 1]\n',
    "pipeline": 'ssm = "last"\ndraft = "tree:2,2,1"\nmicro_batches = 2\n'
    "[[stages]]\nblocks = 1\ndevices = [0]\n[[stages]]\nblocks = 1\ndevices = [1]\n",
}
TOKENS = 5
PROMPTS = [gpu_serve.PROMPT, "another"]


@pytest.fixture(scope="module", params=PLANS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    llm, ssm = gpu_serve.write_models(folder)
    (folder / "plan.toml").write_text(PLANS[request.param])
    out = folder / "tiny.fspec"
    done = flexspec(
        "compile", llm, "--ssm", ssm, "-o", out, "--dtype", "f32", "--target", "sm_90", "--isa", supported_isas()[0],
        "--plan", folder / "plan.toml", "--max-tree", "80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_interpreted_ranks_give_the_tokens_of_the_cpu(artifact: Path) -> None:
    texts = {}
    for device, ranks in (("cpu", "1"), ("interpret", "2")):
        with serving(artifact, "--device", device, "--ranks", ranks, "--threads", "1", "--kv-tokens", "512") as server:
            body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240.0).json()
            texts[device] = [choice["text"] for choice in answer["choices"]]
            assert answer["usage"]["flexspec"]["accepted"] > 0
            assert server.stop(signal.SIGTERM) == 0
    assert texts["interpret"] == texts["cpu"] and all(len(text) == TOKENS for text in texts["cpu"])
