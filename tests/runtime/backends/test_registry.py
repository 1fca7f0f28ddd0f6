"""Devices are records found by presence: nothing but their own files tests which device something runs on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from flexspec.cli.main import build_parser
from flexspec.errors import RequestError
from flexspec.runtime.backends.registry import _NO_BACKEND, DEFAULT_BACKEND, backend_of, backends
from repository import ROOT, SOURCE_FOLDERS, parsed, python_files

DEVICE_NAMES = {"device", "processor"}
# The files of backends, and of kernels that one kind of device runs.
OWN = ("runtime/backends/*", "kernels/gpu/*")


def comparisons(source: str) -> Iterator[str]:
    """Places where a device, its type or its processor is compared with a text."""
    for node in ast.walk(parsed(source)):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            operands = [node.func.value, *node.args]
        names = {getattr(part, "attr", getattr(part, "id", "")) for part in names_in(operands)}
        texts = [operand for operand in operands if isinstance(operand, ast.Constant)]
        if names & DEVICE_NAMES and any(isinstance(text.value, str) for text in texts):
            yield ast.unparse(node)


def names_in(operands: list[ast.expr]) -> Iterator[ast.expr]:
    """The operands, and what their attributes are of: ``x.device`` of ``x.device.type``."""
    for operand in operands:
        while True:
            yield operand
            if not isinstance(operand, ast.Attribute):
                break
            operand = operand.value


def test_no_device_is_known_by_name_outside_its_backend() -> None:
    wrong = []
    for path in python_files(*SOURCE_FOLDERS):
        if not any(path.match(pattern) for pattern in OWN):
            wrong += [f"{path}: {text}" for text in comparisons((ROOT / path).read_text())]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        'x.device == "cpu"', 'device != "cpu"', '"gpu" == kind.device.processor', 'x.device.type == "cuda"',
        'device.startswith("cu")',
    ],
)  # fmt: skip
def test_the_search_finds_a_comparison(text: str) -> None:
    assert list(comparisons(text)) and not list(comparisons("kind == device"))


def test_every_file_of_the_folder_is_a_device_of_its_name() -> None:
    files = {path.stem for path in Path(ROOT / "runtime/backends").glob("*.py")}
    assert set(backends()) == files - set(_NO_BACKEND) and DEFAULT_BACKEND in backends()
    for name, backend in backends().items():
        assert backend.name == name and backend_of(name) is backend
        assert backend.process_group in dist.Backend.backend_list


def test_devices_are_known_without_their_libraries() -> None:
    code = (
        "import sys; from flexspec.runtime.backends.registry import backends; backends(); "
        "print([name for name in ('torch', 'triton', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RequestError, match="device='abacus'; expected one of cpu, cuda, interpret"):
        backend_of("abacus")
    with pytest.raises(SystemExit):
        build_parser("serve").parse_args(["serve", "x.fspec", "--device", "abacus"])
