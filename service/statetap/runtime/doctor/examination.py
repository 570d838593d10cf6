"""Examines workers: first what can be seen without a prompt, then each with prompts of its own, then all against each other.

A worker that is dead, hangs or publishes nonsense gives findings, never an exception. One that a service works with is sent
nothing: exactly one request is in flight for each worker, and the service would take the dumps away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statetap.ports import CaptureInspector, Clock, DumpSourceError, InferenceError
from statetap.runtime.doctor.agreement import Seen, examine_agreement
from statetap.runtime.doctor.announcement import examine_announcement, examine_directory, examine_taps
from statetap.runtime.doctor.findings import Diagnosis, Finding, WorkerReport, error, note, ok, warning
from statetap.runtime.doctor.inputs import Announced, DirectoryFacts, Examined, row_bytes
from statetap.runtime.doctor.probes import Probes
from statetap.runtime.doctor.probing import ProbeSession
from statetap.runtime.doctor.prompts import Room, TokenIds, random_prompt
from statetap.runtime.doctor.server_settings import examine_settings
from statetap.runtime.doctor.space import examine_space
from statetap.runtime.doctor.states import States

START_IT = "start the server, or correct the URL; a server that is still loading answers once it is ready"
SHOWN_REJECTED = 3


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that may be sent prompts: what it announced, its server's arguments, and what its prompts must keep within."""

    announced: Announced
    arguments: Mapping[str, Any]
    room: Room


async def examine(
    workers: Sequence[Examined],
    *,
    clock: Clock,
    inspector: CaptureInspector,
    run: str,
    timeout_seconds: float,
    send_prompts: bool = True,
) -> Diagnosis:
    """Examine all workers at once. `run` names this examination, `timeout_seconds` bounds each answer and each wait for dumps."""
    examinations = [Examination(worker, clock, inspector, run, timeout_seconds) for worker in workers]
    try:
        readiness = await asyncio.gather(*(examination.look() for examination in examinations))
        # One for each server: two would have two requests in flight there.
        willing = {
            worker.url: (examination, ready)
            for worker, examination, ready in zip(workers, examinations, readiness, strict=True)
            if ready is not None and send_prompts
        }
        if willing:
            prompt = _shared_prompt([ready for _, ready in willing.values()])
            await asyncio.gather(*(examination.probe(ready, prompt) for examination, ready in willing.values()))
    finally:
        await asyncio.gather(*(worker.server.close() for worker in workers))
    seen = [examination.seen for examination in examinations]
    across = [*_one_server(workers), *examine_agreement([one for one in seen if one is not None])]
    return Diagnosis(tuple(examination.report for examination in examinations), tuple(across))


def _one_server(workers: Sequence[Examined]) -> list[Finding]:
    """Workers that are the same server under two names: it would get two requests at a time."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        names.setdefault(worker.url, []).append(worker.name)
    return [
        error("configuration", f"{' and '.join(same)} are one server, {url}", "configure each server once, under one name")
        for url, same in names.items()
        if len(same) > 1
    ]


def _shared_prompt(workers: Sequence[Ready]) -> TokenIds:
    """One prompt that every worker has room for and every vocabulary holds."""
    length = min(worker.room.prompt_tokens for worker in workers)
    vocabulary = min(worker.announced.vocab_size for worker in workers)
    return random_prompt(np.random.default_rng(), length, vocabulary)


class Examination:
    """One worker's: `look`, then, if that says that it is ready, `probe`."""

    def __init__(self, worker: Examined, clock: Clock, inspector: CaptureInspector, run: str, timeout_seconds: float) -> None:
        self._worker = worker
        self._clock = clock
        self._inspector = inspector
        self._run = run
        self._timeout_seconds = timeout_seconds
        self._findings: list[Finding] = []
        self._announced: Announced | None = worker.declared
        self._states: States | None = None

    @property
    def report(self) -> WorkerReport:
        return WorkerReport(self._worker.name, self._worker.url, tuple(self._findings))

    @property
    def seen(self) -> Seen | None:
        """For the comparison with others; None where the worker announced nothing."""
        return None if self._announced is None else Seen(self._worker.name, self._announced, self._states)

    async def look(self) -> Ready | None:
        """What can be seen without a prompt. None: it cannot or must not be sent any, and the findings say why."""
        reached = await self._reach()
        arguments, model = reached or ({}, {})
        directory = await asyncio.to_thread(self._worker.look_at_directory)
        if self._announced is None and directory.taps:
            self._announced = directory.taps[0]
        announced = self._announced
        if reached is not None:
            self._findings += examine_settings(arguments, model)
        self._findings += examine_directory(directory, plain=self._worker.declared is not None)
        self._findings += examine_taps(directory.taps, arguments)
        if announced is not None:
            self._findings += examine_announcement(announced, arguments, model)
        if announced is not None and directory.exists:
            budgets = sum(tap.budget_bytes for tap in directory.taps) or announced.budget_bytes
            self._findings += examine_space(announced, directory, budgets)
        self._findings += self._in_use(directory)
        if reached is None or announced is None or not directory.exists or directory.watched:
            return None
        return self._ready(announced, arguments)

    async def _reach(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The server's arguments and what it says of its model; None if it takes no requests."""
        server = self._worker.server
        try:
            arguments, model = await server.settings(), await server.model()
            up = await server.is_up()
            running = await server.requests_running() if up else None
        except InferenceError as failure:
            self._findings.append(error("reachable", str(failure), START_IT))
            return None
        if not up:
            self._findings.append(error("reachable", f"{self._worker.url} answers, but takes no requests yet", START_IT))
            return None
        self._findings.append(ok("reachable", f"{self._worker.url}, version {arguments.get('version') or 'unknown'}"))
        if running:
            self._findings.append(
                warning(
                    "in_use",
                    f"{running} requests run or wait on the server already",
                    "leave the server to one service: other requests take time from it, and where dumps are matched by count, "
                    "spoil samples",
                )
            )
        return arguments, model

    def _in_use(self, directory: DirectoryFacts) -> list[Finding]:
        findings = []
        if (service := self._worker.service) is not None:
            seen = f"a running service has it as {service.state}" + (f": {service.reason}" if service.reason else "")
            if service.in_flight:
                seen += ", with a request in flight"
            findings.append(note("in_use", seen))
        if directory.watched:
            findings.append(
                warning(
                    "in_use",
                    f"a service watches {directory.path} and may work with this worker, so it was sent no prompts",
                    f"for the whole examination, stop the service or take the worker from it (`statetap workers remove "
                    f"{self._worker.name}`), and give it back afterwards",
                )
            )
        return findings

    def _ready(self, announced: Announced, arguments: Mapping[str, Any]) -> Ready | None:
        pool = arguments.get("max_total_num_tokens")
        room = Room(
            chunk=announced.chunked_prefill_size,
            context=announced.context_length,
            budget=announced.budget_bytes // row_bytes(announced),
            pool=pool if isinstance(pool, int) else None,
        )
        if room.prompt_tokens:
            return Ready(announced, arguments, room)
        fix = "raise the chunk size, the context length or the budget of the server: the shortest prompt does not fit"
        self._findings.append(error("round_trip", "there is no room for a prompt, so none was sent", fix))
        return None

    async def probe(self, ready: Ready, prompt: TokenIds) -> None:
        """Send prompts, one at a time, and look at what comes back."""
        session = ProbeSession(
            self._worker.server,
            self._worker.source,
            ready.announced,
            self._worker.identity,
            run=f"{self._run}-{self._worker.name}",
            clock=self._clock,
            inspector=self._inspector,
            timeout_seconds=self._timeout_seconds,
            quiet_period_seconds=self._worker.quiet_period_seconds,
        )
        page = ready.arguments.get("page_size")
        probes = Probes(
            session,
            ready.announced,
            self._worker.identity,
            ready.room,
            page=page if isinstance(page, int) and page > 0 else 1,
            random=np.random.default_rng(),
        )
        try:
            await session.start()
            try:
                await probes.run(prompt)
            finally:
                await session.close()
        except DumpSourceError as failure:
            fix = "make the directory usable for this user, and for nobody else, or wait for whoever watches it"
            self._findings.append(error("dump_directory", str(failure), fix))
        self._findings += probes.findings
        self._states = probes.states
        if session.rejected:
            shown = "; ".join(session.rejected[:SHOWN_REJECTED])
            self._findings.append(
                warning(
                    "dump_directory",
                    f"{len(session.rejected)} things in the directory are no dumps: {shown}",
                    "let nothing but the server write there; remove what is left alone",
                )
            )
