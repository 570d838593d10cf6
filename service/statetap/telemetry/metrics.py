"""The service's Prometheus metrics, in a registry of their own: whoever measures is handed a `Metrics`."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
REQUEST_SAMPLES_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# A request lasts from one short prompt's prefill to the limit for a long batch.
REQUEST_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Every metric by its name without the prefix. Counters end in `_total`; sizes are bytes, times seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.samples_total = self._counter(
            "samples_total", "Samples that ended: stored, failed, skipped or cancelled.", "outcome"
        )
        self.tokens_stored_total = self._counter("tokens_stored_total", "Tokens whose hidden states were committed.")
        self.bytes_stored_total = self._counter("bytes_stored_total", "Bytes of hidden states that were committed.")
        self.units_committed_total = self._counter("units_committed_total", "Units that were committed.")
        self.requests_total = self._counter(
            "requests_total", "Requests to workers: answered, refused, unreachable, timed_out or given_up.", "worker", "outcome"
        )
        self.request_seconds = Histogram(
            "statetap_request_seconds",
            "From a request's send to its answer.",
            ["worker"],
            buckets=REQUEST_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.request_samples = Histogram(
            "statetap_request_samples",
            "Samples that a request carries.",
            ["worker"],
            buckets=REQUEST_SAMPLES_BUCKETS,
            registry=self.registry,
        )
        self.request_tokens_total = self._counter("request_tokens_total", "Tokens of the samples that were asked for.", "worker")
        self.batch_tokens = self._gauge(
            "batch_tokens", "What the samples of a request may hold together: as set, or as tuned; 0 is one sample.", "worker"
        )
        self.engine_busy_share = self._gauge(
            "engine_busy_share", "Share of time in which a pass ran, over the last requests that followed each other.", "worker"
        )
        self.capture_refusals_total = self._counter(
            "capture_refusals_total", "Captures that were refused, by kind of reason.", "reason"
        )
        self.strays_total = self._counter("strays_total", "Dumps that belonged to no sample.", "worker")
        self.worker_up = self._gauge("worker_up", "1 while the worker may be sent requests, else 0.", "worker")
        self.worker_in_flight = self._gauge("worker_in_flight", "Requests in flight: 0 or 1.", "worker")
        self.dump_bytes = self._gauge("dump_bytes", "Bytes of dumps that are held, or reserved for what is to come.", "worker")
        self.quarantines_total = self._counter("quarantines_total", "Times that the worker was quarantined.", "worker")
        self.workers = self._gauge("workers", "Workers by state.", "state")
        self.jobs = self._gauge("jobs", "Jobs by state.", "state")

    def forget_worker(self, worker: str) -> None:
        """Drop the gauges of a worker that left the pool; its counters stay, as counters must."""
        for gauge in (self.worker_up, self.worker_in_flight, self.dump_bytes, self.batch_tokens, self.engine_busy_share):
            with suppress(KeyError):  # never measured
                gauge.remove(worker)

    def render(self) -> bytes:
        """The text that Prometheus scrapes, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"statetap_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"statetap_{name}", meaning, labels, registry=self.registry)
