"""What is measured of one worker's requests: how many, how large, how long, how they ended, and how busy they keep its engine."""

from __future__ import annotations

from collections.abc import Mapping

from structlog.typing import FilteringBoundLogger

from statetap.core.batching import BatchTuner
from statetap.core.dumps import DumpFacts
from statetap.ports import Clock
from statetap.telemetry import events
from statetap.telemetry.metrics import Metrics


class RequestMeter:
    """`requests` went out, `failures` of them brought no answer. `tuner` is fed with what the worker's passes say."""

    def __init__(
        self, worker: str, max_batch_tokens: int | None, *, clock: Clock, metrics: Metrics, log: FilteringBoundLogger
    ) -> None:
        self.requests = 0
        self.failures = 0
        self.tuner = BatchTuner(max_batch_tokens)
        self._worker = worker
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._sent_at = 0.0
        # Looked up once: each request counts in all of them.
        self._in_flight = metrics.worker_in_flight.labels(worker=worker)
        self._samples = metrics.request_samples.labels(worker=worker)
        self._tokens = metrics.request_tokens_total.labels(worker=worker)
        self._seconds = metrics.request_seconds.labels(worker=worker)
        metrics.batch_tokens.labels(worker=worker).set(self.tuner.tokens)

    def sent(self, lengths: Mapping[str, int]) -> None:
        """A request goes out: the tokens of its samples, by rid."""
        self.requests += 1
        self._sent_at = self._clock.monotonic()
        self.tuner.sent(lengths)
        self._in_flight.set(1)
        self._samples.observe(len(lengths))
        self._tokens.inc(sum(lengths.values()))

    def ended(self, outcome: str) -> None:
        """The request that was sent last is over; `outcome` is as in the metric `requests_total`."""
        self.failures += outcome != "answered"
        self._in_flight.set(0)
        self._metrics.requests_total.labels(worker=self._worker, outcome=outcome).inc()
        self._seconds.observe(self._clock.monotonic() - self._sent_at)

    def lost(self, rid: str) -> None:
        """The request with this sample failed as a whole, or there was no room for its dumps."""
        before = self.tuner.tokens
        self.tuner.lost(rid)
        self._tell(before)

    def ran(self, dump: DumpFacts) -> None:
        """A pass ran some of a sample's rows."""
        if dump.rid is not None:
            before, share = self.tuner.tokens, self.tuner.share
            self.tuner.ran(dump.rid, dump.rows, dump.forward_start_ns, dump.forward_end_ns)
            if (self.tuner.tokens, self.tuner.share) != (before, share):
                self._tell(before)

    def _tell(self, tokens_before: int) -> None:
        tuner = self.tuner
        if tuner.share is not None:
            self._metrics.engine_busy_share.labels(worker=self._worker).set(tuner.share)
        if tuner.tokens != tokens_before:
            self._metrics.batch_tokens.labels(worker=self._worker).set(tuner.tokens)
            share = None if tuner.share is None else round(tuner.share, 4)
            self._log.info(events.WORKER_BATCH_TUNED, max_batch_tokens=tuner.tokens, before=tokens_before, busy_share=share)
