"""Run a function of this project under Triton's interpreter, in the process that calls this script.

    TRITON_INTERPRET=1 python tests/kernels/triton_interpreter.py MODULE FUNCTION

Prints what FUNCTION returns as JSON on the last line. The interpreter (triton 3.6 to 3.9) multiplies the raw 16 bits
of bfloat16 operands in tl.dot; the patch below widens them first. It belongs to tests: on a GPU nothing is patched.
"""

import importlib
import json
import sys
from typing import Any


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


if __name__ == "__main__":
    patch_bf16_dot()
    print(json.dumps(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()))
