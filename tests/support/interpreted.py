"""Run a function of a test file in a process of its own, under Triton's interpreter.

Triton decides when it is first imported whether it interprets, so a test cannot switch in its own process. The
interpreter (triton 3.6 to 3.9) multiplies the raw 16 bits of bfloat16 operands in ``tl.dot``; the patch below widens
them first. It belongs to tests: on a GPU nothing is patched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def interpreted(test_file: str, function: str) -> Any:
    """What ``function()`` of ``test_file`` returns (as JSON) when run under the interpreter."""
    done = subprocess.run(
        [sys.executable, __file__, test_file, function],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def patch_bf16_dot() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        return original(self, widen(a), widen(b), acc, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _main(test_file: str, function: str) -> None:
    patch_bf16_dot()
    spec = importlib.util.spec_from_file_location(Path(test_file).stem, test_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    print(json.dumps(getattr(module, function)()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
