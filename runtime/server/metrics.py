"""Prometheus metrics of requests, generated tokens and speculation. Thread-safe.

Only sums are kept. Readers divide them: acceptance is accepted / drafted, tokens per round committed / rounds. A mean
of per-request ratios weighs a short request as much as a long one and is wrong by tens of percent (slime#2240).
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from flexspec.runtime.engine.api import RequestStats

_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OUTPUT_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1.0)


class Metrics:
    """The engine calls ``record_*`` and ``set_*``; the server calls ``record_refused`` and serves ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._make_request_metrics(registry)
        self._make_speculation_metrics(registry)
        self._make_load_metrics(registry)
        self._by_depth: dict[tuple[str, int], tuple[Counter, Counter]] = {}  # labels() costs a lock and a lookup

    def _make_request_metrics(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "flexspec_requests", "Requests that ended in the engine", ["finish_reason"], registry=registry
        )
        self._refused = Counter(
            "flexspec_requests_refused", "HTTP requests answered with an error", ["status", "code"], registry=registry
        )
        self._at_fault = Counter(
            "flexspec_parameters_refused", "Parameters for which requests were refused", ["parameter"],
            registry=registry,
        )  # fmt: skip
        self._prompt = Counter("flexspec_prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self._generated = Counter("flexspec_generated_tokens", "Completion tokens of ended requests", registry=registry)
        self._first_token = Histogram(
            "flexspec_time_to_first_token_seconds", "From submit to the first token, waiting included",
            buckets=_FIRST_TOKEN_S, registry=registry,
        )  # fmt: skip
        self._output_token = Histogram(
            "flexspec_time_per_output_token_seconds", "Decode time over the tokens after the first, of each request",
            buckets=_OUTPUT_TOKEN_S, registry=registry,
        )  # fmt: skip

    def _make_speculation_metrics(self, registry: CollectorRegistry) -> None:
        self._rounds = Counter("flexspec_rounds", "Verify passes of requests", registry=registry)
        self._committed = Counter("flexspec_committed_tokens", "Tokens that rounds committed", registry=registry)
        depth = ["source", "depth"]
        self._drafted = Counter("flexspec_drafted_tokens", "Tree nodes verified", depth, registry=registry)
        self._accepted = Counter("flexspec_accepted_tokens", "Tree nodes accepted", depth, registry=registry)

    def _make_load_metrics(self, registry: CollectorRegistry) -> None:
        self._steps = Histogram("flexspec_step_seconds", "Time of a step", ["kind"], buckets=_STEP_S, registry=registry)
        self._free = Gauge("flexspec_kv_pages_free", "KV pages not in use", registry=registry)
        self._total = Gauge("flexspec_kv_pages_total", "KV pages in the pool", registry=registry)
        self._running = Gauge("flexspec_requests_running", "Requests being generated", registry=registry)
        self._queued = Gauge("flexspec_requests_queued", "Requests waiting for room", registry=registry)

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None:
        """One round of one request. ``drafted[d]`` tree nodes at depth d + 1 and how many of them were accepted.

        ``source`` is the drafter's name ("off" for a round with no draft); ``committed`` the tokens of the round, at
        least one. A tree with nodes of several sources is recorded once for each: with its committed tokens for one of
        them and with 0 for the others, so that it stays one round.
        """
        if committed:
            self._rounds.inc()
            self._committed.inc(committed)
        for depth, nodes in enumerate(drafted, 1):
            pair = self._by_depth.get((source, depth))
            if pair is None:
                labels = (source, str(depth))
                pair = self._by_depth[source, depth] = (self._drafted.labels(*labels), self._accepted.labels(*labels))
            pair[0].inc(nodes)
            if depth <= len(accepted):
                pair[1].inc(accepted[depth - 1])

    def record_step(self, seconds: float, kind: str) -> None:
        """One step of an executor; ``kind`` such as "prefill", "verify", "draft"."""
        self._steps.labels(kind).observe(seconds)

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None:
        """One request ended, for whatever reason. ``first_token_s`` from submit; None if there was no token."""
        self._requests.labels(reason).inc()
        self._prompt.inc(stats.prompt_tokens)
        self._generated.inc(stats.completion_tokens)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
        if stats.completion_tokens > 1:
            self._output_token.observe(stats.decode_s / (stats.completion_tokens - 1))

    def record_refused(self, status: int, code: str | None, parameters: Sequence[str] = ()) -> None:
        """One HTTP request was answered with an error status; ``parameters`` at fault have names of bounded variety."""
        self._refused.labels(str(status), str(code)).inc()
        for parameter in parameters:
            self._at_fault.labels(parameter).inc()

    def set_pages(self, free: int, total: int) -> None:
        """State of the KV pool."""
        self._free.set(free)
        self._total.set(total)

    def set_load(self, running: int, queued: int) -> None:
        """Requests in the engine."""
        self._running.set(running)
        self._queued.set(queued)
