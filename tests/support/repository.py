"""What the repository-wide tests share: the root, the tracked files, and the layer of each source file."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

import flexspec

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("compiler", "kernels", "runtime")  # top-level folders whose import name is flexspec.NAME
SOURCE_FOLDERS = ("flexspec", *LINKED)

# The package file names the Python face and imports it when it is asked for; what is below may not go through it.
FACE = {"flexspec", *(f"flexspec.{name}" for name in flexspec.__all__ if name != "__version__")}
# Lower may not import higher.
LAYERS = {"core": 0, "compiler": 1, "kernels": 2, "runtime": 3, "api": 4, "cli": 5}


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """Files under version control, relative to the root; links count as files, what they point at does not."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return tuple(Path(name) for name in listed.split("\0") if name and (ROOT / name).exists())


def python_files(*folders: str) -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] in folders]


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a source file's text, for reading: many rules look at every file."""
    return ast.parse(source)


def module_name(path: Path) -> str:
    """Import name of a source file: ``runtime/executors/step.py`` is ``flexspec.runtime.executors.step``."""
    parts = path.with_suffix("").parts
    if parts[0] in LINKED:
        parts = ("flexspec", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """Layer of a module of the package."""
    parts = module.split(".")
    if module == "flexspec.__main__":
        return "cli"
    if module in FACE:
        return "api"
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "core"


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Absolute names imported anywhere below ``tree``, one for each name of a ``from`` import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(tree: ast.AST, known: Collection[str]) -> set[str]:
    """Those of the ``known`` modules that are imported anywhere below ``tree``."""
    names = set(imported_names(tree))
    return {name for name in names if name in known} | {
        parent for name in names if name not in known and (parent := name.rpartition(".")[0]) in known
    }
