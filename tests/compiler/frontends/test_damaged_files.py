"""Random damage to tiny checkpoints: they load or fail with one typed error; no other exception, no signal."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from pathlib import Path

import pytest
from tiny_models import byte_level_tokens, random_weights, sentencepiece_tokens, write_gguf, write_huggingface

from flexspec.compiler.frontends.open_model import check_weights, open_model
from flexspec.errors import FlexspecError
from flexspec.models.registry import build_model, expected_weights
from flexspec.runtime.text.tokenizer import Tokenizer
from flexspec.types import DType

ROUNDS = 100
SMALL_BYTES = 1 << 20  # what opening may take beside twice the file's size


def load_whole(path: Path) -> None:
    """All that compiling a model reads: configuration, graph, every weight, tokenizer."""
    model = open_model(path)
    check_weights(model.weights, expected_weights(build_model(model.config, DType.F32)), path)
    for name in model.weights.names():
        model.weights.get(name)
    if model.tokenizer_json is not None:
        tokenizer = Tokenizer(model.tokenizer_json, model.config.eos_ids, model.config.bos_id)
        tokenizer.decode(tokenizer.encode("hello 12 🙂", True))


def damage(rng: random.Random, data: bytes, header_bytes: int) -> bytes:
    """A cut, flips in the header, a run of zeros or ones in it, or junk behind the end."""
    kind = rng.randrange(5)
    at = rng.randrange(min(header_bytes, len(data)))
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return data + rng.randbytes(rng.randrange(1, 100))
    if kind == 2:
        return data[:at] + rng.choice([b"\0", b"\xff"]) * 8 + data[at + 8 :]
    flipped = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        flipped[rng.randrange(header_bytes) % len(data)] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def attempt(path: Path) -> str:
    try:
        load_whole(path)
    except FlexspecError as error:
        assert error.found and error.expected and error.fix
        return error.code
    return "loads"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_damaged_gguf(tmp_path: Path, kind: str) -> None:
    rng = random.Random(143)
    vocab = len(byte_level_tokens() if kind == "gpt2" else sentencepiece_tokens()[0])
    whole = write_gguf(tmp_path / "whole.gguf", random_weights(vocab), tokenizer=kind).read_bytes()
    header_bytes = whole.index(b"blk.1.ffn_down.weight") + 60
    outcomes = {}
    path = tmp_path / "damaged.gguf"
    for _ in range(ROUNDS):
        path.write_bytes(damage(rng, whole, header_bytes))
        outcome = attempt(path)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["FS203"] > ROUNDS // 4 and outcomes["loads"] > 0


def test_damaged_folders(tmp_path: Path) -> None:
    rng = random.Random(141)
    whole = write_huggingface(tmp_path / "whole", random_weights(300))
    weights = (whole / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(weights[:8], "little")
    outcomes = {}
    for _ in range(ROUNDS):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        if rng.randrange(3):
            (folder / "model.safetensors").write_bytes(damage(rng, weights, header_bytes))
        else:
            config = (whole / "config.json").read_bytes()
            (folder / "config.json").write_bytes(damage(rng, config, len(config)))
        outcome = attempt(folder)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["FS203"] > ROUNDS // 4 and outcomes["loads"] > 0


def test_opening_damaged_files_takes_little_memory(tmp_path: Path) -> None:
    rng = random.Random(144)
    whole = write_gguf(tmp_path / "whole.gguf", random_weights(len(byte_level_tokens()))).read_bytes()
    path = tmp_path / "damaged.gguf"
    for _ in range(30):
        path.write_bytes(damage(rng, whole, 8000))
        tracemalloc.start()
        try:
            open_model(path)
        except FlexspecError:
            pass
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak_bytes < 2 * len(whole) + SMALL_BYTES
