"""The layout holds: import names, links, layers, sizes, and which file may import what.

The three top-level folders are part of the package through links, and have no ``__init__.py``: a folder without one
never hides an installed distribution of the same name, such as Hugging Face's ``kernels``.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from repository import (
    LAYERS,
    LINKED,
    ROOT,
    SOURCE_FOLDERS,
    imported_names,
    layer_of,
    module_name,
    parsed,
    python_files,
    tracked_files,
)

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
# Longer than the limits, with their length; an entry may only get smaller, and goes when it is no longer needed.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# Heavy libraries, and the files that may import them when they are imported themselves. Anywhere else they are
# imported inside the function that needs them, or not at all.
HEAVY: dict[str, tuple[str, ...]] = {
    "torch": (
        "benchmarks/*",
        "benchmarks/peers/*",
        "compiler/frontends/torch_mlir/*",
        "examples/*",
        "kernels/reference.py",
        "kernels/gpu/*",
        "runtime/distributed/*",
        "runtime/executors/triton*.py",
        "runtime/backends/triton.py",
        "runtime/open/ranks.py",
        "runtime/reference/*",
        "runtime/tune/*",
    ),
    "triton": (
        "benchmarks/gpu_check.py",
        "kernels/gpu/*",
        "runtime/executors/triton*.py",
        "runtime/backends/triton.py",
    ),
    "torch_mlir": ("compiler/frontends/torch_mlir/*", "compiler/forms/mlir.py"),
    "onnx": ("compiler/frontends/onnx*",),
    "transformers": ("benchmarks/peers/*",),
}


def run_python(code: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def may_import(path: Path, library: str) -> bool:
    return any(path.match(pattern) for pattern in HEAVY[library])


def imports_when_imported(tree: ast.Module) -> Iterator[str]:
    """Names imported by importing the module: not those inside functions or ``if TYPE_CHECKING``."""
    for statement in tree.body:
        is_typing = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if not is_typing and not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield from imported_names(statement)


def test_links_resolve_to_the_top_level_folders() -> None:
    for name in LINKED:
        link = ROOT / "flexspec" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
        assert link.resolve() == ROOT / name


def test_linked_folders_have_no_init_files() -> None:
    assert [str(path) for path in tracked_files() if path.name == "__init__.py" and path.parts[0] in LINKED] == []


@pytest.mark.slow(reason="builds a wheel")
def test_wheel_holds_only_the_package_and_all_of_it(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    for path in tracked_files():
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    strays = [name for name in names if not name.startswith(("flexspec/", "flexspec-"))]
    assert strays == []
    sources = [path for path in tracked_files() if path.parts[0] in SOURCE_FOLDERS and not (ROOT / path).is_dir()]
    expected = {str(path if path.parts[0] == "flexspec" else Path("flexspec", path)) for path in sources}
    assert expected - names == set()


@pytest.mark.slow(reason="imports transformers in a new process")
def test_transformers_imports_at_the_root() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    assert run_python("import transformers; print(transformers.__name__)").strip() == "transformers"


@pytest.mark.slow(reason="imports everything in a new process")
def test_bare_names_are_never_imported() -> None:
    modules = [module_name(path) for path in python_files(*SOURCE_FOLDERS) if path.name != "__main__.py"]
    found = run_python(
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {LINKED} if name in sys.modules])"
    )
    assert found.strip().endswith("[]")


def test_layers_import_downwards_only() -> None:
    wrong = []
    for path in python_files(*SOURCE_FOLDERS):
        layer = layer_of(module_name(path))
        for name in imported_names(parsed((ROOT / path).read_text())):
            if name.split(".")[0] == "flexspec" and LAYERS[layer_of(name)] > LAYERS[layer]:
                wrong.append(f"{path} ({layer}) imports {name}")
    assert wrong == []


def test_heavy_libraries_are_imported_only_where_allowed() -> None:
    wrong = []
    for path in python_files(*SOURCE_FOLDERS, "benchmarks", "examples"):
        for name in imports_when_imported(parsed((ROOT / path).read_text())):
            library = name.split(".")[0]
            if library in HEAVY and not may_import(path, library):
                wrong.append(f"{path} imports {library}")
    assert wrong == []


@pytest.mark.slow(reason="starts processes")
def test_serving_path_loads_no_heavy_library() -> None:
    light = [
        module_name(path)
        for path in python_files(*SOURCE_FOLDERS)
        if path.name != "__main__.py" and not any(may_import(path, library) for library in HEAVY)
    ]
    assert "flexspec.compiler.artifact.open" in light
    found = run_python(
        f"import importlib, sys\nfor name in {light}: importlib.import_module(name)\n"
        f"print([name for name in {tuple(HEAVY)} if name in sys.modules])"
    )
    assert found.strip().endswith("[]")


def test_files_and_functions_are_short() -> None:
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in python_files(*SOURCE_FOLDERS, "benchmarks", "examples"):
        text = (ROOT / path).read_text()
        files[str(path)] = len(text.splitlines())
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{path}::{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    assert {name: n for name, n in files.items() if n > LONG_FILES.get(name, MAX_FILE_LINES)} == {}
    assert {name: n for name, n in functions.items() if n > LONG_FUNCTIONS.get(name, MAX_FUNCTION_LINES)} == {}
    no_longer_long = [name for name in LONG_FILES if files.get(name, 0) <= MAX_FILE_LINES]
    no_longer_long += [name for name in LONG_FUNCTIONS if functions.get(name, 0) <= MAX_FUNCTION_LINES]
    assert no_longer_long == [], "take these off the lists of exceptions"


def test_modules_say_what_they_own() -> None:
    silent = [
        str(path)
        for path in python_files(*SOURCE_FOLDERS, "benchmarks", "examples")
        if (text := (ROOT / path).read_text().strip()) and not ast.get_docstring(parsed(text))
    ]
    assert silent == []
