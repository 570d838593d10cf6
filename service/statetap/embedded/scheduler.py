"""Runs samples through the model, pass after pass, as SGLang's scheduler would, on one thread.

A pass is either an extend pass (up to `chunk_size` prompt tokens over the waiting samples in order; the last one may be cut) or
a decode pass (one token of every running sample). Waiting samples go first. A sample that wants n tokens takes its extend
passes and n-1 decode passes. Every part of an extend pass is published; decode rows only if asked.

Invariants: a rid is in flight once at most; every submitted sample's future is answered exactly once; only the thread touches
model, caches and outlet. An exception in the thread is the server's end (`on_fatal`), as it is SGLang's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from statetap.embedded.model import TappedModel
from statetap.embedded.outlets import Outlet, PublishedRows
from statetap.embedded.prefix_cache import PrefixCache
from statetap.embedded.requests import BadRequest, SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """What became of one sample. `finish_reason` is as in SGLang's `meta_info`; `latency_seconds` from submission to the end.

    `dumps` are, for each output token, the names of all dumps so far; None where dumps have no names.
    """

    rid: str
    output_ids: list[int]
    dumps: list[list[str]] | None
    prompt_tokens: int
    cached_tokens: int
    finish_reason: dict[str, Any]
    latency_seconds: float


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sample in flight. `done` tokens of its prompt have run; None until its first pass looks into the prefix cache."""

    request: SampleRequest
    future: Future[SampleAnswer]
    submitted_at: float
    cache: DynamicCache = field(default_factory=DynamicCache)
    done: int | None = None
    cached_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    dumps: list[list[str]] = field(default_factory=list)
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """One sample's part of a pass: the tokens that stand at `prefix_len` and after."""

    sequence: _Sequence
    token_ids: tuple[int, ...]
    prefix_len: int


class Scheduler:
    """Owns the model. `submit`, `abort` and `flush_cache` may be called from any thread; the rest is the thread's own."""

    def __init__(
        self,
        model: TappedModel,
        outlet: Outlet,
        *,
        chunk_size: int | None,
        on_fatal: Callable[[Exception], None],
        prefix_cache: PrefixCache | None = None,
        publish_decode: bool = False,
        gap_seconds: float = 0.0,
    ) -> None:
        self._model = model
        self._outlet = outlet
        self._chunk_size = chunk_size
        self._on_fatal = on_fatal
        self._prefix_cache = prefix_cache
        self._publish_decode = publish_decode
        self._gap_seconds = gap_seconds
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._in_flight: dict[str, _Sequence] = {}
        self._forward_pass = 0
        self._flush = False
        self._stopped = threading.Event()
        self._changed = threading.Condition()  # guards the queues, the flags and `_Sequence.aborted`
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Abort what is in flight and end the thread. False: a pass was still running when the time was over."""
        with self._changed:
            self._stopped.set()
            self._changed.notify()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[SampleAnswer]]:
        """Queue the samples of one request, all or none. A future answers for each.

        Raises:
            BadRequest: a rid is in flight already, or the worker is going down.
        """
        now = time.monotonic()
        with self._changed:
            if self._stopped.is_set():
                raise BadRequest("The server is shutting down.")
            for request in requests:
                if request.rid in self._in_flight:
                    raise BadRequest(f"Duplicate request ID detected: {request.rid}")
            sequences = [_Sequence(request, _uncancellable(), now) for request in requests]
            self._waiting += sequences
            self._in_flight |= {s.request.rid: s for s in sequences}
            self._changed.notify()
        return [s.future for s in sequences]

    def abort(self, rid: str) -> None:
        """Abort a sample at its next pass; an unknown rid is nobody's, and no error."""
        with self._changed:
            if rid in self._in_flight:
                self._in_flight[rid].aborted = True
                self._changed.notify()

    def flush_cache(self) -> None:
        """Empty the prefix cache before the next pass."""
        with self._changed:
            self._flush = True

    def load(self) -> tuple[int, int]:
        """How many samples have begun, and how many wait for their first pass."""
        with self._changed:
            begun = len(self._running) + sum(s.done is not None for s in self._waiting)
            return begun, len(self._in_flight) - begun

    def _run(self) -> None:
        try:
            while self._await_work():
                self._pass()
                if self._gap_seconds:
                    self._stopped.wait(self._gap_seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must not live on without its scheduler
            with self._changed:
                self._stopped.set()
            self._on_fatal(error)
        for sequence in list(self._in_flight.values()):
            self._finish(sequence, _abort_reason("The server is shutting down."))

    def _await_work(self) -> bool:
        """Settle what was asked for since the last pass, and wait until there is a pass to run. False: stop."""
        while True:
            with self._changed:
                if self._stopped.is_set():
                    return False
                if self._flush and self._prefix_cache is not None:
                    self._prefix_cache.clear()
                self._flush = False
                aborted = [s for s in self._in_flight.values() if s.aborted]
                if not aborted:
                    if self._waiting or self._running:
                        return True
                    self._changed.wait()
            for sequence in aborted:
                self._finish(sequence, _abort_reason("Aborted by AbortReq."))

    def _pass(self) -> None:
        extend = bool(self._waiting)
        parts = self._extend_parts() if extend else self._decode_parts()
        capture = extend or self._publish_decode
        self._forward_pass += 1
        start_ns = time.monotonic_ns()
        next_tokens = []
        for part in parts:
            output = self._model.run(part.token_ids, part.sequence.cache, capture=capture)
            next_tokens.append(output.next_token)
            if capture:
                self._publish(part, output.states, start_ns)
        for part, next_token in zip(parts, next_tokens, strict=True):
            self._advance(part, next_token)

    def _publish(self, part: _Part, states: Mapping[str, torch.Tensor], start_ns: int) -> None:
        """In mid-pass, so that a batch's states are not all held at once: the pass ends with its last rows, not with these."""
        name = self._outlet.publish(
            PublishedRows(
                rid=part.sequence.request.rid,
                token_ids=part.token_ids,
                prefix_len=part.prefix_len,
                prompt_len=len(part.sequence.request.token_ids),
                forward_pass=self._forward_pass,
                forward_start_ns=start_ns,
                forward_end_ns=time.monotonic_ns(),
                states=states,
            )
        )
        part.sequence.named += [] if name is None else [name]

    def _extend_parts(self) -> list[_Part]:
        parts: list[_Part] = []
        room = self._chunk_size
        with self._changed:
            waiting = list(self._waiting)
        for sequence in waiting:
            if room == 0:
                break
            start = self._admit(sequence) if sequence.done is None else sequence.done
            token_ids = sequence.request.token_ids[start:]
            if room is not None:
                token_ids = token_ids[:room]
                room -= len(token_ids)
            parts.append(_Part(sequence, token_ids, start))
        return parts

    def _admit(self, sequence: _Sequence) -> int:
        if self._prefix_cache is not None:
            request = sequence.request
            sequence.cached_tokens, sequence.cache = self._prefix_cache.longest(request.extra_key, request.token_ids)
        return sequence.cached_tokens

    def _decode_parts(self) -> list[_Part]:
        return [_Part(s, (s.output_ids[-1],), len(s.request.token_ids) + len(s.output_ids) - 1) for s in self._running]

    def _advance(self, part: _Part, next_token: int) -> None:
        sequence, request = part.sequence, part.sequence.request
        stop = part.prefix_len + len(part.token_ids)
        if stop < len(request.token_ids):
            sequence.done = stop
            return
        if stop == len(request.token_ids):
            with self._changed:
                self._waiting.remove(sequence)
                self._running.append(sequence)
            sequence.done = stop
            if self._prefix_cache is not None:
                self._prefix_cache.keep(request.extra_key, request.token_ids, sequence.cache)
        if request.max_new_tokens > 0:
            sequence.output_ids.append(next_token)
            sequence.dumps.append(list(sequence.named))
        if next_token in self._model.eos_token_ids and sequence.output_ids and not request.ignore_eos:
            self._finish(sequence, {"type": "stop", "matched": next_token})
        elif len(sequence.output_ids) >= request.max_new_tokens:
            self._finish(sequence, {"type": "length", "length": request.max_new_tokens})

    def _finish(self, sequence: _Sequence, reason: dict[str, Any]) -> None:
        request, outputs = sequence.request, sequence.output_ids
        if self._prefix_cache is not None and len(outputs) > 1:
            # The last answered token has not run, so the cache does not hold it.
            self._prefix_cache.keep(request.extra_key, (*request.token_ids, *outputs[:-1]), sequence.cache)
        with self._changed:
            for queue in (self._waiting, self._running):
                if sequence in queue:
                    queue.remove(sequence)
            del self._in_flight[request.rid]
        sequence.future.set_result(
            SampleAnswer(
                rid=request.rid,
                output_ids=outputs,
                dumps=sequence.dumps if sequence.named else None,
                prompt_tokens=len(request.token_ids),
                cached_tokens=sequence.cached_tokens,
                finish_reason=reason,
                latency_seconds=time.monotonic() - sequence.submitted_at,
            )
        )


def _uncancellable() -> Future[SampleAnswer]:
    # A waiter that goes away cancels its future; the scheduler answers it all the same, once the abort is through.
    future: Future[SampleAnswer] = Future()
    future.set_running_or_notify_cancel()
    return future


def _abort_reason(message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message}
