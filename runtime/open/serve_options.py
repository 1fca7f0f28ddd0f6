"""How an artifact is run: what ``serve`` and ``generate`` let a user choose."""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.kv_slots import STEP_ROWS, pages_of

DEFAULT_DRAFT = "auto"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an artifact is run. ``draft`` "auto" takes the artifact's plan; ``threads`` 0 is one a core, at most 8.

    ``device``: cpu, cuda (also AMD GPUs, by torch's name), or interpret (GPU kernels in Triton's interpreter).
    """

    draft: str = DEFAULT_DRAFT
    device: str = "cpu"
    threads: int = 0
    kv_tokens: int = 16_384
    max_requests: int = 16
    max_rows: int = STEP_ROWS
    context_tokens: int = 0  # 0 = as long as the model and the pool allow
    measure: bool = True  # time a few steps at start, so that the tree budget knows its costs
    checks: bool = True  # all digests and the self-test

    @property
    def pages(self) -> int:
        """KV pages of each model's pool."""
        return pages_of(self.kv_tokens)
