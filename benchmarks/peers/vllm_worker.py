"""vLLM's CPU build: greedy, ``batch`` requests at a time through its own continuous batching."""

from __future__ import annotations

import os
import time

from benchmarks.peers.worker import Completion, Job, Measurement, pin_threads, run_worker


def measure(job: Job) -> Measurement:
    pin_threads(job.threads)
    # Read by vLLM when it is imported or starts its engine.
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.threads - 1}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm

    llm = vllm.LLM(
        model=str(job.model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(len(prompt) for prompt in job.prompts) + job.max_new_tokens + 8,
        max_num_seqs=job.batch,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def complete(prompts: list[list[int]], new_tokens: int) -> list[Completion]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, stop_token_ids=job.eos_ids, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [to_completion(output) for output in outputs]

    complete([prompt[:8] for prompt in job.prompts[: job.batch]], 4)
    begin = time.perf_counter()
    if job.batch == 1:
        completions = [complete([prompt], job.max_new_tokens)[0] for prompt in job.prompts]
    else:
        completions = complete(job.prompts, job.max_new_tokens)
    return Measurement(f"vllm {vllm.__version__}", completions, time.perf_counter() - begin)


def to_completion(output: object) -> Completion:
    metrics = output.metrics  # type: ignore[attr-defined]
    ids = list(output.outputs[0].token_ids)  # type: ignore[attr-defined]
    if metrics is None:
        return Completion(ids, 0.0, 0.0)
    prefill_s = metrics.first_token_ts - metrics.scheduled_ts
    return Completion(ids, prefill_s, metrics.last_token_ts - metrics.first_token_ts)


if __name__ == "__main__":
    run_worker(measure)
