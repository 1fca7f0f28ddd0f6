"""How much a step and a KV pool may hold: the sizes of executors, and the limits of messages between ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Most rows of a step, and pages of the pool."""

    max_rows: int
    pages: int
