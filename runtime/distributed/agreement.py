"""What all ranks must agree on before they run a step together, and the error for the first rank that differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from flexspec import __version__
from flexspec.errors import ArtifactError

_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Agreement:
    """One rank's side of it. The error names the first field that differs."""

    artifact: str  # sha256 of its manifest, which has the digests of everything else; or a name where there is none
    device: str = ""
    max_rows: int = 0  # of a step
    pages: int = 0  # of the KV pool
    draft: str = ""  # as requested: the artifact's plan decides what "auto" is
    context_tokens: int = 0  # as requested, 0: as long as the model and the pool allow
    version: str = field(default_factory=lambda: __version__)

    def encode(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in _LABELS}).encode()


_LABELS: Mapping[str, str] = {
    "version": "flexspec version",
    "artifact": "artifact",
    "device": "--device",
    "max_rows": "number of rows a step may have (--max-requests)",
    "pages": "number of KV pages (--kv-tokens)",
    "draft": "--draft",
    "context_tokens": "--context",
}
assert set(_LABELS) == {member.name for member in fields(Agreement)}


def check_agreement(encoded: Sequence[bytes]) -> None:
    """``encoded``: every rank's side, rank 0's first. Raises ArtifactError naming the first field that differs."""
    sides = [_decode(side) for side in encoded]
    for name, label in _LABELS.items():
        for rank, side in enumerate(sides):
            if side.get(name) != sides[0].get(name):
                raise ArtifactError(
                    f"rank {rank} has a different {label} ({_shown(side.get(name))}) from rank 0 "
                    f"({_shown(sides[0].get(name))})",
                    "the same on every rank",
                    "give all ranks the same artifact, flexspec version and options",
                )


def _decode(side: bytes) -> Mapping[str, object]:
    """Another version may send anything; its version is then reported as missing."""
    try:
        body = json.loads(side)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _shown(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:12]}..."
