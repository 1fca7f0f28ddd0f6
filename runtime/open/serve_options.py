"""How an artifact is run: what ``serve``, ``generate`` and the Python face let a user choose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from flexspec.errors import CapacityError
from flexspec.kv_slots import STEP_ROWS, pages_of
from flexspec.runtime.backends.registry import DEFAULT_BACKEND, backend_of
from flexspec.runtime.executors.room import Room

DEFAULT_DRAFT = "auto"
_RANGES = {
    "threads": (0, 512),
    "kv_tokens": (64, 1 << 30),
    "max_requests": (1, 4096),
    "max_rows": (1, 4096),
    "context_tokens": (0, 1 << 30),
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an artifact is run."""

    draft: str = DEFAULT_DRAFT  # a draft plan; "auto": the artifact's
    device: str = DEFAULT_BACKEND  # a backend's name (runtime/backends)
    threads: int = 0  # CPU threads; 0 = one per core, at most 8
    kv_tokens: int = 16_384  # that the KV pool of each model holds
    max_requests: int = 16  # that run at once
    max_rows: int = STEP_ROWS  # of one step
    context_tokens: int = 0  # of a prompt and its output; 0 = as long as the model and the pool allow
    measure: bool = True  # time a few steps at startup, so that the tree budget knows its costs
    checks: bool = True  # all digests and the self-test

    @property
    def pages(self) -> int:
        """KV pages of each model's pool."""
        return pages_of(self.kv_tokens)

    @property
    def room(self) -> Room:
        """The size of the LLM's executor: every running request has a row."""
        return Room(max(self.max_rows, self.max_requests), self.pages)


def prepare(options: ServeOptions, flags: Mapping[str, str] | None = None) -> ServeOptions:
    """Check ``options``, set the environment that their device needs, and return them.

    ``flags``: the command's flag of an option, for messages. Raises CapacityError for numbers out of range,
    RequestError for an unknown device.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name)
        if not low <= value <= high:
            flag = (flags or {}).get(name)
            found = f"{flag} {value}" if flag else f"{name}={value}"
            raise CapacityError(found, f"{low} to {high}", f"choose {flag or name} in that range")
    os.environ.update(backend_of(options.device).environment)
    return options
