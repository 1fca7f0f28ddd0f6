"""A sampling parameter is recorded once, and every part that must know of it does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from sampling_values import SAMPLING_VALUES

from flexspec.cli.main import build_parser
from flexspec.cli.options.sampling import sampling_params
from flexspec.errors import RequestError
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.sampling import LAW_FIELDS, SamplingParams
from repository import ROOT

NAMES = [field.name for field in fields(SamplingParams)]
BASE = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_generate_has_an_option_for_it(name: str) -> None:
    value, words = SAMPLING_VALUES[name].other, SAMPLING_VALUES[name].words
    command = ["generate", "x.fspec", "-p", "hello"]
    parser = build_parser("generate")
    assert sampling_params(parser.parse_args([*command, *words])) == replace(SamplingParams(), **{name: value})
    assert sampling_params(parser.parse_args(command)) == SamplingParams(), "one call must not change another's default"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_the_http_interface_names_it(name: str) -> None:
    table = (ROOT / "docs/http.md").read_text().split("## Parameters")[1].split("\n## ")[0]
    assert f"`{name}`" in table


@pytest.mark.parametrize("name", NAMES)
def test_what_shapes_the_law_is_what_travels_to_ranks_that_draw_by_it(name: str) -> None:
    logits = np.array([3.0, 2.5, 1.0, 0.0, -2.0], np.float32)
    changed = replace(BASE, **{name: SAMPLING_VALUES[name].other})
    changes = not np.array_equal(target_law(logits, BASE), target_law(logits, changed))
    assert (changes or name == "seed") == (name in LAW_FIELDS)  # a seed decides what is drawn by the law


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("max_tokens", 2.0), ("max_tokens", "2"), ("top_k", True), ("temperature", float("nan")),
     ("temperature", None), ("seed", 1.5), ("seed", 2**64), ("stop", ("",)), ("stop", ["x"] * 17)],
)  # fmt: skip
def test_values_out_of_range_or_of_another_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("given", "kept"), [("end", ("end",)), (["a", "b"], ("a", "b")), ((), ())])
def test_stop_is_one_text_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept
