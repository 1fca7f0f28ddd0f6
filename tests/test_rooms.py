"""The rooms inside compiler, kernels and runtime: each in the table below, none too full, no import against the order.

The layers themselves (core, compiler, kernels, runtime, commands) are held by test_layout.py; docs/design/house.md says
what each room owns.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import networkx
import pytest

from repository import LINKED, ROOT, SOURCE_FOLDERS, imported_modules, module_name, parsed, python_files

MOST_FILES = 15
# A room may import rooms that stand before it in its row, and no others.
ROOMS: dict[str, tuple[str, ...]] = {
    "compiler": ("passes", "frontends", "artifact", "forms", "partition", "prices", "planner", "pages"),
    "kernels": ("templates", "cpu", "gpu", "package"),
    "runtime": (
        "text", "acceptance", "executors", "reference", "drafters", "engine", "distributed", "backends", "open",
        "server", "tune", "measure",
    ),
}  # fmt: skip
# Files that stand beside the rooms: anybody above their layer may import them, they import none of the rooms.
BESIDE = {"kernels/expression.py", "kernels/reference.py"}


def room_of(module: str) -> tuple[str, str] | None:
    """(folder, room) of a module of the three folders: flexspec.runtime.engine.round is ("runtime", "engine")."""
    parts = module.split(".")
    return (parts[1], parts[2]) if len(parts) > 3 and parts[1] in LINKED else None


def arrows() -> list[tuple[str, str]]:
    """(module, module that it imports), of the whole project, imports inside functions and for types included.

    The package file is left out: its names are the Python face, resolved when they are asked for.
    """
    paths = [path for path in python_files(*SOURCE_FOLDERS) if str(path) != "flexspec/__init__.py"]
    known = {module_name(path) for path in paths}
    return [
        (module_name(path), target)
        for path in paths
        for target in imported_modules(parsed((ROOT / path).read_text()), known)
    ]


def test_every_file_stands_in_a_room() -> None:
    folders = {(path.parts[0], path.parts[1]) for path in python_files(*LINKED) if str(path) not in BESIDE}
    assert sorted(folders) == sorted(
        (folder, room) for folder in ROOMS for room in ROOMS[folder] if room != "templates"
    )


def test_rooms_import_in_their_order() -> None:
    wrong = []
    for module, target in arrows():
        here, there = room_of(module), room_of(target)
        if here and there and here[0] == there[0]:
            order = ROOMS[here[0]]
            if order.index(there[1]) > order.index(here[1]):
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_files_beside_the_rooms_import_none() -> None:
    modules = {module_name(Path(path)): path for path in BESIDE}
    assert [
        f"{m} imports {t}" for m, t in arrows() if m in modules and (r := room_of(t)) and r[0] == m.split(".")[1]
    ] == []


def test_no_imports_go_round_in_a_circle() -> None:
    circles = networkx.strongly_connected_components(networkx.DiGraph(arrows()))
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


@pytest.mark.parametrize("folder", SOURCE_FOLDERS)
def test_no_folder_is_crowded(folder: str) -> None:
    sizes = Counter(path.parent for path in python_files(folder) if not path.stem.startswith("__"))
    assert {str(place): size for place, size in sizes.items() if size > MOST_FILES} == {}


@pytest.mark.parametrize("folder", LINKED)
def test_no_prefix_fakes_a_folder(folder: str) -> None:
    """Three files of one room that begin with the same word want a folder of their own."""
    words = Counter((path.parent, path.stem.split("_")[0]) for path in python_files(folder) if "_" in path.stem)
    assert {f"{place}/{word}_*": n for (place, word), n in words.items() if n > 2 and word not in VERBS} == {}


VERBS = {"fuse", "open", "check", "draw"}  # passes and pages are named for what they do
