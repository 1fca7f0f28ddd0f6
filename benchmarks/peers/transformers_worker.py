"""Hugging Face transformers in bfloat16, eager, one sequence with its default cache: the simplest peer."""

from __future__ import annotations

import torch
import transformers

from benchmarks.peers.worker import Completion, Job, Measurement, generate, one_by_one, pin_threads, run_worker


def measure(job: Job) -> Measurement:
    pin_threads(job.threads)
    torch.set_num_threads(job.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    model.eval()

    def complete(prompt: list[int]) -> Completion:
        cache = None

        def feed(tokens: list[int]) -> int:
            nonlocal cache
            ids_1T = torch.tensor([tokens])
            result = model(ids_1T, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = result.past_key_values
            return int(result.logits[0, -1].argmax())

        return generate(job, feed, prompt)

    with torch.inference_mode():
        return one_by_one(job, f"transformers {transformers.__version__}, torch {torch.__version__}", complete)


if __name__ == "__main__":
    run_worker(measure)
