"""How much a step and a KV pool may hold: what executors are sized by, and what no message between ranks may exceed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Most rows of a step, and pages of the pool."""

    max_rows: int
    pages: int
