"""Compile a tiny model with its SSM for a GPU target and answer a prompt there: the same text as on the CPU?

Owns the tiny checkpoints and the commands; gpu_check.py and the tests call it. Every step is a ``flexspec`` command in
a process of its own, as a user runs it. Each token is one character, so equal texts are equal tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.tensor_file import encode_tensors
from flexspec.kernels.cpu.build import supported_isas

ROOT = Path(__file__).parents[1]
DRAFTS = ("off", "tree:2,2,1")
MAX_TREE = 80  # two ancestor words, so that small trees also show that missing words are filled
PROMPT = "a prompt"
END = "<|end|>"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The output of ``flexspec generate`` under one draft plan."""

    draft: str
    device: str
    text: str
    summary: str


class CommandFailed(Exception):
    """A ``flexspec`` command ended with an error; the message is its stderr."""


def flexspec(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one command of this source tree; raises CommandFailed with its stderr."""
    command = [sys.executable, "-m", "flexspec", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    done = subprocess.run(command, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailed(done.stderr.strip())
    return done


def write_models(folder: Path) -> tuple[Path, Path]:
    """A random two-layer LLM with a tokenizer, and an SSM that is almost the LLM and shares its embedding."""
    vocabulary = [END, *map(chr, range(0x21, 0x7F)), "Ġ"]  # "Ġ" is the byte-level spelling of a space
    weights = _random_weights(len(vocabulary))
    rng = np.random.default_rng(1)
    near = {
        name: array if "embed" in name else array + 0.02 * rng.standard_normal(array.shape).astype(np.float32)
        for name, array in weights.items()
    }
    for name, tensors in (("llm", weights), ("ssm", near)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": len(vocabulary)}))
        (folder / name / "model.safetensors").write_bytes(b"".join(encode_tensors(tensors)))
    (folder / "llm" / "tokenizer.json").write_text(_tokenizer_json(vocabulary))
    return folder / "llm", folder / "ssm"


def compile_tiny(folder: Path, target: str, dtype: str = "f32") -> tuple[Path, str]:
    """The artifact of :func:`write_models` for ``target`` and this CPU, and what the compiler printed."""
    llm, ssm = write_models(folder)
    out = folder / f"tiny-{dtype}.fspec"
    done = flexspec(
        "compile", llm, "--ssm", ssm, "-o", out, "--dtype", dtype, "--target", target, "--isa", supported_isas()[0],
        "--draft", DRAFTS[1], "--max-tree", str(MAX_TREE),
    )  # fmt: skip
    return out, done.stdout


def generate(artifact: Path, device: str, draft: str, max_tokens: int = 10) -> GeneratedText:
    done = flexspec(
        "generate", artifact, "-p", PROMPT, "--raw", "--max-tokens", str(max_tokens), "--device", device,
        "--draft", draft, "--kv-tokens", "256", "--threads", "1",
    )  # fmt: skip
    return GeneratedText(draft, device, done.stdout.removesuffix("\n"), done.stderr.strip())


def differences(target: str, device: str) -> dict[str, int]:
    """By draft plan, the number of places where the text from ``device`` differs from the CPU's.

    Empty, with a printed line, if the artifact cannot be compiled because a C++ compiler or Triton is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            artifact, _ = compile_tiny(Path(folder), target)
        except CommandFailed as error:
            if "FS302" not in str(error):
                raise
            print(f"nothing served: {error}")
            return {}
        counts = {}
        for draft in DRAFTS:
            right, ours = (generate(artifact, name, draft).text for name in ("cpu", device))
            counts[draft] = sum(a != b for a, b in itertools.zip_longest(right, ours))
        return counts


def _random_weights(vocab: int) -> dict[str, NDArray[np.float32]]:
    width, ffn, heads, kv_heads = (
        CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = width // heads
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, width), "norm.weight": (width,)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (heads * head_dim, width),
            "self_attn.k_proj": (kv_heads * head_dim, width),
            "self_attn.v_proj": (kv_heads * head_dim, width),
            "self_attn.o_proj": (width, heads * head_dim),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (ffn, width),
            "mlp.up_proj": (ffn, width),
            "mlp.down_proj": (width, ffn),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    scale = {1: 1.0, 2: 0.3}
    return {f"model.{n}": (scale[len(s)] * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}


def _tokenizer_json(vocabulary: list[str]) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return str(tokenizer.to_str())
