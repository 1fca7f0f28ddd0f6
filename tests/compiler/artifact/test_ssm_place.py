"""Places of SSMs: what each means for ranks, devices and stages; and no other file asks for a place's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from flexspec.compiler.artifact.ssm_place import (
    PLACES,
    EveryDevice,
    FirstStage,
    LastStage,
    NoSsm,
    SeparateDevices,
    SsmPlace,
    place_named,
    place_of_ranks,
)
from repository import ROOT, parsed, python_files

STAGES = ((4, 2), (0,))
EVERY = (0, 1, 2, 4)


@pytest.mark.parametrize(
    ("place", "devices"),
    [
        (NoSsm(), ()),
        (SeparateDevices(), ((7,), (8,))),
        (FirstStage(), ((4,), (4,))),
        (LastStage(), ((0,), (0,))),
        (EveryDevice(), (EVERY, EVERY)),
    ],
    ids=lambda value: value.name if isinstance(value, SsmPlace) else "",
)
def test_each_place_agrees_with_the_devices_that_it_assigns(
    place: SsmPlace, devices: tuple[tuple[int, ...], ...]
) -> None:
    assigned = place.assign(STAGES, 2, separate=(7, 8), every=EVERY)
    assert assigned == devices
    assert [name for name in PLACES if place_named(name).agrees(STAGES, assigned)] == [place.name]
    assert place_of_ranks(STAGES, assigned) == place


@pytest.mark.parametrize("name", PLACES)
def test_only_a_place_without_ssms_agrees_with_none(name: str) -> None:
    assert place_named(name).agrees(STAGES, ()) == (name == "none")


def test_an_only_stage_is_the_first() -> None:
    assert [place_named(name).with_stages(1).name for name in PLACES] == ["none", "own", "first", "first", "all"]
    assert all(place_named(name).with_stages(2) == place_named(name) for name in PLACES)


def test_devices_without_a_stage_are_taken_from_one_kind_of_node() -> None:
    assert [SeparateDevices(1).reserved(kind, 2) for kind in range(3)] == [0, 2, 0]
    assert [EveryDevice().requests_a_device(requests, 4) for requests in (1, 4, 5)] == [1, 1, 2]


def names_compared(tree: ast.AST) -> Iterator[ast.expr]:
    """What is compared with anything, and the keys of tables."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for side in sides:
            yield from side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else (side,)
        if isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)


# These read model files, and values of requests, in which such words mean other things ("tool_choice": "none").
FOREIGN_WORDS = ("compiler/frontends/", "runtime/server/bodies/neutral.py")


def test_no_other_file_asks_for_the_name_of_a_place() -> None:
    asking = [
        f"{path}:{value.lineno}: {value.value}"
        for path in python_files("compiler", "runtime")
        if not path.as_posix().startswith(FOREIGN_WORDS)
        for value in names_compared(parsed((ROOT / path).read_text()))
        if isinstance(value, ast.Constant) and value.value in PLACES
    ]
    assert asking == []
