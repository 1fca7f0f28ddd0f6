"""Training sets process-wide float behaviour; tests of other folders must not see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def denormals_as_before() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)
