"""Nobody asks what an operator is called: its record says what others need to know.

Named are operators where they are declared (flexspec/ops), called (the builder), rewritten (a pass) or given code (an
emitter, a kernel); and by the files below, each for its reason. The list may only shrink: an entry that is no longer
needed fails too.
"""

from __future__ import annotations

import ast
from pathlib import Path

from flexspec.ops.record import all_records
from repository import ROOT, SOURCE_FOLDERS, parsed, python_files

HOME = ("flexspec/ops/*", "flexspec/builder.py", "compiler/passes/*", "kernels/cpu/emitters/*")
WRITTEN = "writes nodes of these operators"
OTHER = "another thing of the same name"
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "compiler/partition/cut_ranks.py": (
        WRITTEN, {"partition", "combine", "reduce", "send", "recv", "replicate"},
    ),
    "compiler/frontends/torch_mlir/rules.py": (WRITTEN, {"rms_norm", "add", "linear", "swiglu"}),
    "compiler/frontends/torch_mlir/terms.py": (WRITTEN, {"rope", "attention", "linear"}),
    "compiler/frontends/torch_mlir/views.py": (WRITTEN, {"split_heads", "merge_heads"}),
    "runtime/measure/link_probe.py": ("measures these operators between ranks", {"send", "recv", "reduce"}),
    "runtime/measure/stamps.py": ("the line of what joins logits behind a program, where no node is", {"combine"}),
    "compiler/frontends/rope_settings.py": (f"{OTHER}: a kind of rotary scaling", {"linear"}),
    "flexspec/cli/inspection/page.py": (f"{OTHER}: a line of a page", {"rope"}),
    "kernels/cpu/pack.py": (f"{OTHER}: an order of tiles", {"swiglu"}),
    "kernels/cpu/render.py": (f"{OTHER}: the kernel whose epilogue writes logits", {"linear"}),
}  # fmt: skip


def names_in(path: Path, operators: set[str]) -> set[str]:
    strings = (node.value for node in ast.walk(parsed((ROOT / path).read_text())) if isinstance(node, ast.Constant))
    return {value for value in strings if isinstance(value, str) and value in operators}


def test_operators_are_known_by_their_records() -> None:
    operators = set(all_records())
    named = {
        str(path): names
        for path in python_files(*SOURCE_FOLDERS)
        if not any(path.match(pattern) for pattern in HOME) and (names := names_in(path, operators))
    }
    allowed = {path: names for path, (_, names) in ALLOWED.items()}
    unknown = {path: sorted(names - allowed.get(path, set())) for path, names in named.items()}
    assert {path: names for path, names in unknown.items() if names} == {}, "read the operator's record instead"
    needless = {path: sorted(names - named.get(path, set())) for path, names in allowed.items()}
    assert {path: names for path, names in needless.items() if names} == {}, "take these off the list"
