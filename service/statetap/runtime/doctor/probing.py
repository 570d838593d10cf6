"""Sends prompts to one worker and takes what it publishes for them: one request in flight, every wait bounded.

Invariants: no token id outside the vocabulary is sent; each request has a rid and a cache key of its own; what was published for
these requests is released, and of what was in the directory before, nothing is, but for the remains of an earlier examination.
The rids are no `RequestName`s, so a service that meets such a dump knows it for a stray.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statetap.core.capture import (
    Complete,
    Expected,
    Incomplete,
    NeedDigests,
    Refusal,
    RefusalReason,
    assemble_by_count,
    assemble_by_tokens,
    is_prompt_row,
    require_named,
)
from statetap.core.spec import Identity
from statetap.ports import (
    CaptureInspector,
    CaptureLost,
    CapturePart,
    Clock,
    Dump,
    DumpEvent,
    DumpRejected,
    DumpSeen,
    DumpSource,
    DumpSourceError,
    GenerateAnswer,
    GenerateSample,
    InferenceError,
)
from statetap.runtime.doctor.inputs import Announced, ExaminedServer, capture_of, model_of
from statetap.runtime.doctor.prompts import TokenIds
from statetap.runtime.doctor.states import States, states_of
from statetap.runtime.waiting import wait_or_sleep

RID_PREFIX = "statetap-doctor-"
LOOK_AGAIN_SECONDS = 0.5


@dataclass(slots=True)
class Probe:
    """One prompt of a request: its answer, once it is there, and what was published for it."""

    rid: str
    token_ids: TokenIds
    answer: GenerateAnswer | None = None
    dumps: dict[str, Dump] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def beyond_prompt(self) -> int:
        """Dumps of rows that are not the prompt's: of decode passes. Without row ranges: those of a single row."""
        facts = [dump.facts for dump in self.dumps.values()]
        return sum(not is_prompt_row(one, self.rows) if one.rid is not None else one.rows == 1 < self.rows for one in facts)


@dataclass(frozen=True, slots=True)
class Capture:
    """A prompt's verified rows: how many dumps they came in, the digest of their bytes, and their values."""

    dumps: int
    digest: int
    states: States
    has_checksums: bool


class ProbeSession:
    """One worker's, from `start` to `close`. `run` is part of its rids, so that no two examinations share any."""

    def __init__(
        self,
        server: ExaminedServer,
        source: DumpSource,
        announced: Announced,
        identity: Identity,
        *,
        run: str,
        clock: Clock,
        inspector: CaptureInspector,
        timeout_seconds: float,
        quiet_period_seconds: float,
    ) -> None:
        self.rejected: list[str] = []
        self._server = server
        self._source = source
        self._announced = announced
        self._capture = capture_of(announced)
        self._arrays = self._capture.hidden_arrays(model_of(announced))
        self._identity = identity
        self._run = run
        self._clock = clock
        self._inspector = inspector
        self._timeout_seconds = timeout_seconds
        self._quiet_period_seconds = quiet_period_seconds
        self._probes: dict[str, Probe] = {}
        self._lifecycle: Probe | None = None
        self._begun = False
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Raises DumpSourceError: the directory cannot be used, or somebody else watches it."""
        await self._source.start(self._on_dump_event)
        self._begun = True

    async def close(self) -> None:
        """Release what is still there of all requests, and let go of the directory."""
        self._lifecycle = None
        with suppress(DumpSourceError):
            await self._source.rescan()
        for probe in self._probes.values():
            self.release(probe)
        await self._source.close()

    async def send(self, *prompts: TokenIds, new_tokens: int = 1) -> list[Probe]:
        """Send prompts as one request and wait for the answer.

        Raises:
            InferenceError: there was none within the time-out; a request that may still run is aborted.
            ValueError: a token id outside the vocabulary.
        """
        for prompt in prompts:
            if not 0 <= prompt.min() <= prompt.max() < self._announced.vocab_size:
                raise ValueError("a probe holds a token id outside the vocabulary: it would kill the server")
        first = len(self._probes)
        probes = [Probe(f"{RID_PREFIX}{self._run}-{first + index}", prompt) for index, prompt in enumerate(prompts)]
        self._probes |= {probe.rid: probe for probe in probes}
        if self._identity is Identity.COUNT:
            (self._lifecycle,) = probes
        samples = [GenerateSample(probe.rid, probe.token_ids, probe.rid) for probe in probes]
        try:
            answers = await self._server.ask(samples, new_tokens=new_tokens, timeout_seconds=self._timeout_seconds)
        except InferenceError:
            for probe in probes:
                with suppress(InferenceError):
                    await self._server.abort(probe.rid)
            raise
        for probe, answer in zip(probes, answers, strict=True):
            probe.answer = answer
        return probes

    async def capture(self, probe: Probe) -> Capture | Refusal:
        """Wait until the probe's rows are there, or cannot be any more, or the time-out is over."""
        verdict = await self._settled(probe)
        if not isinstance(verdict, Complete):
            return verdict
        chosen = [probe.dumps[dump] for dump in verdict.dump_ids]
        parts = [CapturePart(dump.views, dump.row_checksums) for dump in chosen]
        report = await self._inspector.inspect(parts, self._arrays)
        if report.refusal is not None:
            return report.refusal
        return Capture(
            len(chosen),
            report.digest,
            states_of([dump.views for dump in chosen], self._capture, model_of(self._announced)),
            all(dump.row_checksums is not None for dump in chosen),
        )

    def release(self, probe: Probe) -> None:
        for dump in probe.dumps.values():
            self._release(dump)
        probe.dumps.clear()

    def _release(self, dump: Dump) -> None:
        try:
            dump.release()
        except OSError as error:
            self.rejected.append(f"{dump.facts.dump_id} cannot be removed: {error.strerror}")

    async def _settled(self, probe: Probe) -> Complete | Refusal:
        deadline = self._clock.monotonic() + self._timeout_seconds
        while True:
            await self._source.rescan()
            if self._identity is Identity.COUNT:
                await self._clock.sleep(self._quiet_period_seconds)
                await self._source.rescan()
            if probe.lost:
                return Refusal(RefusalReason.LOST_BY_PUBLISHER, probe.lost[0])
            cached = probe.answer.cached_tokens if probe.answer is not None else 0
            verdict = await self._verdict(probe)
            # By count, whatever has the full length is somebody else's then.
            if cached and (isinstance(verdict, Incomplete) or self._identity is Identity.COUNT):
                return Refusal(
                    RefusalReason.PREFIX_CACHED, f"{cached} of {probe.rows} tokens came from the worker's prefix cache"
                )
            if not isinstance(verdict, Incomplete):
                return verdict
            left = deadline - self._clock.monotonic()
            if left <= 0:
                missing = (
                    f"rows {verdict.start} to {verdict.stop} of {probe.rows} did not appear within {self._timeout_seconds:g} s"
                )
                return Refusal(RefusalReason.MISSING_ROWS, missing)
            await wait_or_sleep(self._changed, self._clock, min(left, LOOK_AGAIN_SECONDS))

    async def _verdict(self, probe: Probe) -> Complete | Incomplete | Refusal:
        token_ids: NDArray[np.int32] = probe.token_ids.astype("<i4")
        expected = Expected(token_ids.tobytes(), self._arrays, self._capture, self._announced.model_fingerprint)
        digests: dict[str, int] = {}
        while True:
            facts = [dump.facts for dump in probe.dumps.values()]
            if self._identity is Identity.TOKENS:
                named = probe.answer.dumps if probe.answer is not None else None
                verdict = require_named(assemble_by_tokens(expected, facts, digests), facts, named)
            else:
                verdict = assemble_by_count(expected, self._announced.chunked_prefill_size, facts, digests)
            if not isinstance(verdict, NeedDigests):
                return verdict
            for dump in verdict.dump_ids:
                digests[dump] = await self._inspector.digest(probe.dumps[dump].views)

    def _on_dump_event(self, event: DumpEvent) -> None:
        match event:
            case DumpSeen(dump):
                self._take(dump)
            case CaptureLost(rid, reason):
                if rid in self._probes:
                    self._probes[rid].lost.append(reason)
            case DumpRejected(name, reason):
                self.rejected.append(f"{name}: {reason}")
        self._changed.set()

    def _take(self, dump: Dump) -> None:
        rid = dump.facts.rid
        if rid is None:
            if self._lifecycle is not None:
                self._lifecycle.dumps[dump.facts.dump_id] = dump
            elif self._begun:
                self._release(dump)
        elif rid in self._probes:
            self._probes[rid].dumps[dump.facts.dump_id] = dump
        elif rid.startswith(RID_PREFIX):
            self._release(dump)
