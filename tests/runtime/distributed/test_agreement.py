"""What ranks must have alike: the first that differs is named with its field and both values."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from flexspec.errors import ArtifactError
from flexspec.runtime.distributed.agreement import Agreement, check_agreement

SIDE = Agreement(artifact="ab" * 32, device="cpu", max_rows=256, pages=64, draft="auto", context_tokens=0)
CHANGES = {
    "version": ("0.0.9", "flexspec version (0.0.9) from rank 0"),
    "artifact": ("cd" * 32, "artifact (cdcdcdcdcdcd...) from rank 0 (abababababab...)"),
    "device": ("cuda", "--device (cuda) from rank 0 (cpu)"),
    "max_rows": (40, "number of rows a step may have (--max-requests) (40) from rank 0 (256)"),
    "pages": (8, "number of KV pages (--kv-tokens) (8) from rank 0 (64)"),
    "draft": ("off", "--draft (off) from rank 0 (auto)"),
    "context_tokens": (128, "--context (128) from rank 0 (0)"),
}


def test_every_field_is_tried() -> None:
    assert set(CHANGES) == {field.name for field in fields(Agreement)}
    check_agreement([SIDE.encode()] * 3)


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_differs_is_named(name: str) -> None:
    value, words = CHANGES[name]
    other = replace(SIDE, **{name: value})
    with pytest.raises(ArtifactError) as caught:
        check_agreement([side.encode() for side in (SIDE, SIDE, other, SIDE)])
    assert caught.value.found.startswith(f"rank 2 has a different {words}")


def test_the_version_is_named_before_what_follows_from_it() -> None:
    other = replace(SIDE, version="9.9.9", artifact="cd" * 32, pages=1)
    with pytest.raises(ArtifactError, match=r"rank 1 has a different flexspec version \(9\.9\.9\)"):
        check_agreement([SIDE.encode(), other.encode()])


@pytest.mark.parametrize("side", [b"", b"\xff\xfe", b"[1]", b'{"protocol": 2}'])
def test_what_another_version_may_send_is_no_crash(side: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"rank 1 has a different flexspec version \(nothing\)"):
        check_agreement([SIDE.encode(), side])
