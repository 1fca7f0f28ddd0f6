"""llama.cpp through its C interface: one sequence, greedy, all threads of the job.

The thin interface is used rather than llama-cpp-python's generator, so that Python costs microseconds per token.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.worker import Completion, Job, Measurement, generate, one_by_one, pin_threads, run_worker


class Sequence:
    """One llama.cpp context with a single sequence in it."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        # Repacked weights are faster, but their AMX path has given wrong text on some machines: the driver tries both.
        model_params.use_extra_bufts = os.environ.get("PEER_EXTRA_BUFFERS", "1") == "1"
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(job.model), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {job.model}")
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx = max(len(prompt) for prompt in job.prompts) + job.max_new_tokens + 8
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = job.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def feed(self, tokens: list[int]) -> int:
        """Append ``tokens`` and return the most likely next one."""
        for start in range(0, len(tokens), 512):
            part = tokens[start : start + 512]
            array = (llama_cpp.llama_token * len(part))(*part)
            if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(part))):
                raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def measure(job: Job) -> Measurement:
    pin_threads(job.threads)
    sequence = Sequence(job)

    def complete(prompt: list[int]) -> Completion:
        sequence.clear()
        return generate(job, sequence.feed, prompt)

    return one_by_one(job, f"llama-cpp-python {llama_cpp.__version__}", complete)


if __name__ == "__main__":
    run_worker(measure)
