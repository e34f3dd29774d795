"""Every metric, once: name, labels, unit and meaning. ``docs/metrics.md`` is generated from here.

Two sets: `EdgeMetrics` (HTTP, delivery, admission) and `WorkerMetrics` (the engine, and the ``vllm:`` names that
dashboards and autoscalers of the field read). A fact is counted by one side only, so sums over all processes are right:
what a client saw is the edge's, what the model did is the worker's.

Labels are bounded: model names come from the registry, never from a request; handlers are route templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, disable_created_metrics
from prometheus_client import generate_latest as exposition

__all__ = ["CONTENT_TYPE", "EdgeMetrics", "Instrument", "Instruments", "WorkerMetrics", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_S: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_HTTP_S: Final = (0.1, 0.5, 1.0)
_HTTP_FINE_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_CALL_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric as documented."""

    name: str  # as scraped: a counter's ends with _total
    kind: str  # counter, gauge, histogram, summary
    labels: tuple[str, ...]
    meaning: str


class Instruments:
    """Makes instruments in one registry and keeps the list of them for the documentation."""

    def __init__(self, registry: CollectorRegistry, common_labels: Sequence[str] = ()) -> None:
        # A creation time for each series doubles the page and nobody reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        self.catalogue: list[Instrument] = []
        self._common = tuple(common_labels)

    def counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, meaning, self._listed(f"{name}_total", "counter", meaning, labels), registry=self.registry)

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, meaning, self._listed(name, "gauge", meaning, labels), registry=self.registry)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        names = self._listed(name, "histogram", meaning, labels)
        return Histogram(name, meaning, names, buckets=buckets, registry=self.registry)

    def summary(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Summary:
        return Summary(name, meaning, self._listed(name, "summary", meaning, labels), registry=self.registry)

    def _listed(self, name: str, kind: str, meaning: str, labels: Sequence[str]) -> tuple[str, ...]:
        names = (*self._common, *labels)
        self.catalogue.append(Instrument(name, kind, names, meaning))
        return names


class EdgeMetrics:
    """What one edge process did for its clients."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        make = Instruments(CollectorRegistry() if registry is None else registry)
        self.registry = make.registry
        self.catalogue = make.catalogue

        # HTTP, under the names that FastAPI dashboards know
        http = ("handler", "method")
        self.http_requests = make.counter(
            "http_requests", "HTTP requests answered, by route template, method and status class.", (*http, "status")
        )
        self.http_duration = make.histogram(
            "http_request_duration_seconds", "From the request's arrival to the end of its answer.", _HTTP_S, http
        )
        self.http_duration_fine = make.histogram(
            "http_request_duration_highr_seconds", "The same over all routes, in finer buckets.", _HTTP_FINE_S
        )
        self.http_request_size = make.summary("http_request_size_bytes", "Size of request bodies.", ("handler",))
        self.http_response_size = make.summary("http_response_size_bytes", "Size of answers.", ("handler",))

        # Generations
        self.requests = make.counter(
            "headrace_edge_requests",
            "Generations answered. outcome: ok, error, cancelled, handed_over (to another edge, when draining), "
            "accepted (in the background), shed.",
            ("endpoint", "model", "outcome"),
        )
        self.requests_in_flight = make.gauge(
            "headrace_edge_requests_in_flight", "Generations that a client of this edge waits for or reads."
        )
        self.request_duration = make.histogram(
            "headrace_edge_request_duration_seconds",
            "A generation from arrival to its last byte.",
            _REQUEST_S,
            ("model",),
        )
        self.time_to_first_token = make.histogram(
            "headrace_edge_time_to_first_token_seconds",
            "From a generation's arrival to its first output leaving the edge.",
            _TTFT_S,
            ("model",),
        )
        self.inter_chunk = make.histogram(
            "headrace_edge_inter_chunk_seconds",
            "Between two chunks of one stream leaving the edge.",
            _ITL_S,
            ("model",),
        )
        self.delivered_tokens = make.counter(
            "headrace_edge_delivered_tokens", "Tokens in events handed to clients.", ("model",)
        )
        self.render_seconds = make.histogram(
            "headrace_edge_render_seconds", "Chat template and tokenisation of one request.", _CALL_S
        )
        self.submit_seconds = make.histogram(
            "headrace_edge_submit_seconds", "Submission of one request to the log, durability included.", _CALL_S
        )
        self.rejections = make.counter(
            "headrace_edge_rejections",
            "Requests refused before admission, by the limit that was reached, else by error code.",
            ("reason",),
        )
        self.given_up = make.counter(
            "headrace_edge_given_up",
            "Requests ended because no worker of their model was there. code: that of the error.",
            ("code",),
        )
        self.cancels = make.counter("headrace_edge_cancels", "Cancellations sent, by reason.", ("reason",))

        # Relay
        self.frames = make.counter("headrace_edge_frames", "Notification frames received.")
        self.catch_up_reads = make.counter(
            "headrace_edge_catch_up_reads",
            "Reads of a request's log. why: attach, gap, quiet, slow_reader, resubscribed.",
            ("why",),
        )
        self.slow_readers = make.counter(
            "headrace_edge_slow_readers", "Times that a reader's buffer was full and dropped, to be read again."
        )
        self.resumed_streams = make.counter(
            "headrace_edge_resumed_streams", "Streams continued from a position that the client gave."
        )

        # The log as this edge sees it
        self.queue_depth = make.gauge(
            "headrace_queue_depth", "Admitted and unfinished requests of a model, all edges together.", ("model",)
        )
        self.queue_tokens = make.gauge(
            "headrace_queue_tokens", "Prompt and budgeted output tokens of those requests.", ("model",)
        )
        self.live_workers = make.gauge("headrace_live_workers", "Workers of a model that hold a lease.", ("model",))
        self.log_errors = make.counter(
            "headrace_edge_log_errors", "Calls to the log that failed, by operation.", ("operation",)
        )
        self.log_up = make.gauge("headrace_edge_log_up", "1 while the log answers this edge, else 0.")


class WorkerMetrics:
    """What one worker's engine did. Every series carries ``model_name`` and ``engine`` (the worker's number).

    Attributes are bound to those two labels already: ``metrics.step_seconds("forward").observe(0.02)``,
    ``metrics.num_requests_running.set(3)``.
    """

    def __init__(self, model_name: str, engine: str = "0", registry: CollectorRegistry | None = None) -> None:
        make = Instruments(CollectorRegistry() if registry is None else registry, ("model_name", "engine"))
        self.registry = make.registry
        self.catalogue = make.catalogue
        self._bound = (model_name, engine)
        who = self._bound

        # The names of the field
        self.num_requests_running = make.gauge(
            "vllm:num_requests_running", "Sequences in the engine's running batch."
        ).labels(*who)
        self.num_requests_waiting = make.gauge(
            "vllm:num_requests_waiting", "Sequences that the worker owns and has not scheduled."
        ).labels(*who)
        self.kv_cache_usage = make.gauge("vllm:kv_cache_usage_perc", "Used part of the KV blocks, 0 to 1.").labels(*who)
        self.prompt_tokens = make.counter("vllm:prompt_tokens", "Prompt tokens of started requests.").labels(*who)
        self.generation_tokens = make.counter("vllm:generation_tokens", "Tokens generated.").labels(*who)
        self._success = make.counter(
            "vllm:request_success", "Requests ended: stop, length, abort or error.", ("finished_reason",)
        )
        self.num_preemptions = make.counter(
            "vllm:num_preemptions", "Sequences put back because KV blocks ran out."
        ).labels(*who)
        self.prefix_cache_queries = make.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        ).labels(*who)
        self.prefix_cache_hits = make.counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        ).labels(*who)
        self.time_to_first_token = make.histogram(
            "vllm:time_to_first_token_seconds", "From arrival at the edge to the first token in the log.", _TTFT_S
        ).labels(*who)
        self.inter_token_latency = make.histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one choice.", _ITL_S
        ).labels(*who)
        self.e2e_latency = make.histogram(
            "vllm:e2e_request_latency_seconds", "From arrival at the edge to the terminal event.", _REQUEST_S
        ).labels(*who)
        self.queue_time = make.histogram(
            "vllm:request_queue_time_seconds", "From arrival at the edge to the first scheduling.", _REQUEST_S
        ).labels(*who)
        self.prefill_time = make.histogram(
            "vllm:request_prefill_time_seconds", "From the first scheduling to the first token.", _REQUEST_S
        ).labels(*who)
        self.decode_time = make.histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        ).labels(*who)
        self.inference_time = make.histogram(
            "vllm:request_inference_time_seconds", "From the first scheduling to the last token.", _REQUEST_S
        ).labels(*who)
        self.request_prompt_tokens = make.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of one request.", _TOKENS
        ).labels(*who)
        self.request_generation_tokens = make.histogram(
            "vllm:request_generation_tokens", "Tokens generated for one request.", _TOKENS
        ).labels(*who)
        self.iteration_tokens = make.histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one engine step.", _SIZES
        ).labels(*who)

        # The step
        self._step_seconds = make.histogram(
            "headrace_worker_step_seconds",
            "One engine step, by phase: schedule, prepare, forward, sample.",
            _STEP_S,
            ("phase",),
        )
        self.step_sequences = make.histogram(
            "headrace_worker_step_sequences", "Sequences in one engine step.", _SIZES
        ).labels(*who)
        self._kv_blocks = make.gauge(
            "headrace_worker_kv_blocks", "KV blocks by state: used, cached (free, content kept), free.", ("state",)
        )

        # The way to the log
        self.output_backlog = make.gauge(
            "headrace_worker_output_backlog_steps", "Step results that the output stage has not written yet."
        ).labels(*who)
        self.output_lag = make.histogram(
            "headrace_worker_output_lag_seconds", "From the end of a step to its events in the log.", _STEP_S
        ).labels(*who)
        self.append_seconds = make.histogram(
            "headrace_worker_append_seconds", "One append call, all sequences of a step together.", _CALL_S
        ).labels(*who)
        self.appended_events = make.counter("headrace_worker_appended_events", "Events written to the log.").labels(
            *who
        )
        self.log_errors = make.counter(
            "headrace_worker_log_errors", "Calls to the log that failed and were tried again."
        ).labels(*who)

        # Ownership
        self.claims = make.counter("headrace_worker_claims", "Requests claimed from the queue.").labels(*who)
        self.takeovers = make.counter(
            "headrace_worker_takeovers", "Requests taken over from a worker that lost its lease."
        ).labels(*who)
        self.handovers = make.counter("headrace_worker_handovers", "Requests released while draining.").labels(*who)
        self.fenced = make.counter(
            "headrace_worker_fenced", "Requests dropped because another worker owns them now."
        ).labels(*who)
        self._cancels = make.counter("headrace_worker_cancels", "Requests ended by a cancellation.", ("reason",))
        self._stalls = make.counter(
            "headrace_worker_stalls",
            "Times that a step took far too long. outcome: suspected, then slow (it went on) or stuck (the worker "
            "ended).",
            ("outcome",),
        )
        self.wasted_tokens = make.counter(
            "headrace_worker_wasted_tokens", "Tokens computed again after preemption or takeover."
        ).labels(*who)
        self.lease_renewals = make.counter("headrace_worker_lease_renewals", "Lease renewals that succeeded.").labels(
            *who
        )
        self.lease_remaining = make.gauge(
            "headrace_worker_lease_remaining_seconds", "Time to the end of the lease at the last renewal."
        ).labels(*who)
        self.draining = make.gauge("headrace_worker_draining", "1 while the worker takes nothing new.").labels(*who)
        for reason in ("stop", "length", "abort", "error"):
            self.request_success(reason)
        for outcome in ("suspected", "slow", "stuck"):
            self.stalls(outcome)

    def request_success(self, finished_reason: str) -> Counter:
        """``finished_reason``: stop, length, abort, error."""
        return self._success.labels(*self._bound, finished_reason)

    def step_seconds(self, phase: str) -> Histogram:
        return self._step_seconds.labels(*self._bound, phase)

    def kv_blocks(self, state: str) -> Gauge:
        return self._kv_blocks.labels(*self._bound, state)

    def stalls(self, outcome: str) -> Counter:
        """``outcome``: suspected, slow, stuck."""
        return self._stalls.labels(*self._bound, outcome)

    def cancels(self, reason: str) -> Counter:
        return self._cancels.labels(*self._bound, reason)
