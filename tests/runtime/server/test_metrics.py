"""Counters are sums, by which the pooled ratios come out right."""

from __future__ import annotations

import threading

import pytest

from flexspec.runtime.engine.api import RequestStats
from flexspec.runtime.server.metrics import Metrics


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_acceptance_is_pooled(metrics: Metrics) -> None:
    metrics.record_round("chain", [10], [1], 2)
    metrics.record_round("chain", [100], [90], 91)
    accepted, drafted = (
        total(metrics, "flexspec_accepted_tokens_total"),
        total(metrics, "flexspec_drafted_tokens_total"),
    )
    assert (accepted, drafted) == (91, 110)  # the mean of 0.1 and 0.9 would say 0.5


def test_rounds_by_source_and_depth(metrics: Metrics) -> None:
    metrics.record_round("tree", [4, 8, 8], [1, 1], 3)
    metrics.record_round("tree", [4, 8], [1, 0], 2)
    metrics.record_round("off", [], [], 1)
    assert total(metrics, "flexspec_rounds_total") == 3
    assert total(metrics, "flexspec_committed_tokens_total") == 6
    assert [total(metrics, "flexspec_drafted_tokens_total", depth=str(depth)) for depth in (1, 2, 3)] == [8, 16, 8]
    assert [total(metrics, "flexspec_accepted_tokens_total", depth=str(depth)) for depth in (1, 2, 3)] == [2, 1, 0]


def test_a_tree_of_two_sources_is_one_round(metrics: Metrics) -> None:
    metrics.record_round("ngram", [1, 1], [1, 1], 3)
    metrics.record_round("ssm", [3, 2], [0, 0], 0)
    assert total(metrics, "flexspec_rounds_total") == 1
    assert total(metrics, "flexspec_committed_tokens_total") == 3
    assert total(metrics, "flexspec_drafted_tokens_total", source="ssm") == 5
    assert total(metrics, "flexspec_accepted_tokens_total", source="ngram", depth="2") == 1


def test_generated_is_the_sum_of_completion_tokens(metrics: Metrics) -> None:
    counts = [1, 7, 0, 23]
    for count in counts:
        stats = RequestStats(prompt_tokens=5, completion_tokens=count, decode_s=0.011 * max(0, count - 1))
        metrics.record_finished("stop" if count else "cancelled", stats, 0.2 if count else None)
    assert total(metrics, "flexspec_generated_tokens_total") == sum(counts)
    assert total(metrics, "flexspec_prompt_tokens_total") == 20
    assert total(metrics, "flexspec_requests_total", finish_reason="stop") == 3
    assert total(metrics, "flexspec_requests_total", finish_reason="cancelled") == 1
    assert total(metrics, "flexspec_time_to_first_token_seconds_count") == 3
    assert total(metrics, "flexspec_time_per_output_token_seconds_count") == 2
    assert total(metrics, "flexspec_time_per_output_token_seconds_sum") == pytest.approx(0.022)


def test_gauges_and_steps(metrics: Metrics) -> None:
    metrics.set_pages(30, 64)
    metrics.set_load(3, 2)
    metrics.record_step(0.02, "verify")
    metrics.record_step(0.04, "verify")
    metrics.record_refused(503, "queue_full")
    metrics.record_refused(400, "unsupported_parameter", ("tools", "logprobs"))
    assert total(metrics, "flexspec_kv_pages_free") == 30 and total(metrics, "flexspec_kv_pages_total") == 64
    assert total(metrics, "flexspec_requests_running") == 3 and total(metrics, "flexspec_requests_queued") == 2
    assert total(metrics, "flexspec_step_seconds_sum", kind="verify") == pytest.approx(0.06)
    assert total(metrics, "flexspec_requests_refused_total", status="503", code="queue_full") == 1
    assert total(metrics, "flexspec_parameters_refused_total") == 2
    assert total(metrics, "flexspec_parameters_refused_total", parameter="tools") == 1


def test_threads_lose_no_counts(metrics: Metrics) -> None:
    def record() -> None:
        for _ in range(500):
            metrics.record_round("tree", [2, 2], [1, 0], 2)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total(metrics, "flexspec_rounds_total") == 2000
    assert total(metrics, "flexspec_drafted_tokens_total") == 8000
