"""Names of an artifact's members are spelled in compiler/artifact/layout.py and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from flexspec.compiler.artifact import layout
from repository import ROOT, SOURCE_FOLDERS, parsed, python_files

SPELLED = re.compile(
    r"\b(manifest|model|plan|ranks|checks|tokenizer|meta)\.json|\.jinja|ngram\.safetensors|\.canonical|\.fsg\b"
    r"|^(graph|weights|kernels/cpu)/|^kernels/$|/program\.cpp|^\.fspec$|^cpu-$|llm\.rank"
)
# The layout itself, what reads files of checkpoints that have the same names, --dump-ir, and what includes templates of
# a folder that is called like an artifact's.
ALLOWED = {
    "compiler/artifact/layout.py",
    "compiler/frontends/huggingface.py",
    "compiler/frontends/tokenizer_gguf.py",
    "compiler/passes/pipeline.py",
    "kernels/cpu/render.py",
    "runtime/text/tokenizer.py",
}


def spelled(source: str) -> Iterator[str]:
    """Texts of a file that are no docstrings, help or examples of a command."""
    tree = parsed(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_no_member_is_spelled_outside_the_layout() -> None:
    wrong = []
    for path in python_files(*SOURCE_FOLDERS):
        if str(path) not in ALLOWED:
            found = [text for text in spelled((ROOT / path).read_text()) if SPELLED.search(text)]
            wrong += [f"{path}: {text[:60]!r}" for text in found]
    assert wrong == []


@pytest.mark.parametrize("text", ['f"graph/{name}.fsg"', '"checks.json"', 'f"weights/{n}.safetensors"', 'f"cpu-{isa}"'])
def test_the_search_finds_a_spelled_name(text: str) -> None:
    assert any(SPELLED.search(part) for part in spelled(f"x = {text}"))


def test_names_and_their_way_back() -> None:
    members = [layout.graph_file("llm"), layout.graph_file("llm.rank0"), layout.cpu_source("llm"), layout.PLAN]
    assert layout.graph_names(members) == ["llm", layout.rank_name(0)]
    kernels = [layout.gpu_kernel_facts("tree_d64"), layout.gpu_member("tree_d64", "x.bin"), layout.cpu_source("llm")]
    assert layout.gpu_variants(kernels) == ["tree_d64"]
