"""A program is its bytes when it was opened, whatever becomes of its path."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from flexspec.kernels.cpu.build import build_path
from flexspec.kernels.cpu.launch import _open_library

SOURCE = 'extern "C" int answer() { return VALUE; }\n'


def built(value: int) -> Path:
    return build_path(SOURCE.replace("VALUE", str(value)), "generic")


def test_a_path_compiled_again_is_the_new_program(tmp_path: Path) -> None:
    path = tmp_path / "program.so"
    shutil.copy(built(1), path)
    first = _open_library(path)
    shutil.copy(built(2), tmp_path / "new.so")
    os.replace(tmp_path / "new.so", path)
    assert (first.answer(), _open_library(path).answer()) == (1, 2)


def test_a_program_cut_or_written_in_place_does_not_change_what_is_open(tmp_path: Path) -> None:
    path = tmp_path / "program.so"
    shutil.copy(built(1), path)
    library = _open_library(path)
    with path.open("r+b") as file:
        file.truncate(0)
    assert library.answer() == 1  # mapped from the file it would end the process (SIGBUS)
    path.write_bytes(built(2).read_bytes())
    assert library.answer() == 1 and _open_library(path).answer() == 2


def test_without_files_in_memory_the_path_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(1, "forbidden")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    path = tmp_path / "program.so"
    shutil.copy(built(1), path)
    assert isinstance(library := _open_library(path), ctypes.CDLL) and library.answer() == 1
