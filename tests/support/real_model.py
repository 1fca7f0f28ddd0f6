"""The real model that tests/real runs, where it has been downloaded."""

from __future__ import annotations

import pytest

from repository import ROOT

MODEL = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDS_MODEL = [
    pytest.mark.real,
    pytest.mark.skipif(
        not MODEL.is_file(), reason=f"{MODEL.name} is not there: python benchmarks/fetch_model.py downloads it"
    ),
]
