"""The LLM side of a tune run: its generated CPU program with taps, its tokenizer and its chat frame."""

from __future__ import annotations

from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import TokenizerError
from flexspec.models.registry import build_model
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.text.chat import render_chat
from flexspec.runtime.text.tokenizer import Tokenizer
from flexspec.runtime.tune.prompts import ChatFrame
from flexspec.types import DType

_PROBE = "flexspec asks here"  # plain words that no template changes


def open_tokenizer(model: LoadedModel) -> tuple[Tokenizer, ChatFrame]:
    """The model's tokenizer and the frame of a single-turn chat. Raises TokenizerError if it has none."""
    if model.tokenizer_json is None or not model.chat_template:
        raise TokenizerError(
            f"{model.name} without a tokenizer or chat template", "a chat model that has both",
            "tune an instruct model: an SSM is trained on the chats that the model invents",
        )  # fmt: skip
    config = model.config
    tokenizer = Tokenizer(model.tokenizer_json, config.eos_ids, config.bos_id)
    rendered = render_chat(model.chat_template, [{"role": "user", "content": _PROBE}], True, **model.special_tokens)
    return tokenizer, ChatFrame.from_rendered(rendered, _PROBE)


def open_executor(
    model: LoadedModel, tap_layers: tuple[int, ...], *, pages: int, max_rows: int, threads: int
) -> CpuExecutor:
    """Generate, build and load the LLM's CPU program with its taps. Raises what compilation and weights raise."""
    graph = run_passes(build_model(model.config, DType.BF16, taps=tap_layers), LLM_PASSES)
    return CpuExecutor.from_graph(graph, model.weights.get, pages=pages, max_rows=max_rows, threads=threads)
