"""Where one worker's dumps go: each is routed once, as its source posts it.

Dumps of nobody are released at once; dumps of a unit that was open when the service last stopped are parked until it is leased
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from statetap.core.dumps import DumpFacts
from statetap.core.requests import RequestName
from statetap.core.routing import DumpRouter, Parked, Stray, ToUnit, UnitId
from statetap.core.unit_messages import Fault
from statetap.ports import CaptureLost, Clock, Dump, DumpEvent, DumpRejected, DumpSeen, TapRefused, TapSeen
from statetap.runtime.dump_space import DumpSpace
from statetap.runtime.loss_pause import LossPause
from statetap.runtime.releasing import release_again, tell_of
from statetap.telemetry import events
from statetap.telemetry.metrics import Metrics


class UnitInbox(Protocol):
    """Where an open unit takes what is published for it."""

    def take_dump(self, rid: str, facts: DumpFacts, dump: Dump) -> None: ...
    def take_loss(self, rid: str, reason: str, fault: Fault) -> None: ...
    def forgive(self, sample: int, failures: int) -> None: ...


@dataclass(slots=True)
class Inboxes:
    """The open units of this host, and those that were open when the service last stopped; shared by its drivers."""

    open: dict[UnitId, UnitInbox]
    expected_back: set[UnitId]


class DumpIntake:
    """Takes the events of one worker's dump source. `on_tap` hears of its taps, `on_stray` of dumps that are nobody's.

    `on_rows` hears of dumps that are a unit's, `on_crowded` of the rids for whose dumps there was no room.
    """

    def __init__(
        self,
        worker: str,
        inboxes: Inboxes,
        space: DumpSpace,
        pause: LossPause,
        *,
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
        on_tap: Callable[[TapSeen | TapRefused], None],
        on_stray: Callable[[DumpFacts], None],
        on_rows: Callable[[DumpFacts], None],
        on_crowded: Callable[[str], None],
    ) -> None:
        self.router = DumpRouter(inboxes.open.keys(), inboxes.expected_back)
        self._worker = worker
        self._inboxes = inboxes
        self._space = space
        self._pause = pause
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._on_tap = on_tap
        self._on_stray = on_stray
        self._on_rows = on_rows
        self._on_crowded = on_crowded
        self._releases: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Try no longer to release what could not be released."""
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def take(self, event: DumpEvent) -> None:
        match event:
            case DumpSeen(dump):
                self._route(dump)
            case CaptureLost():
                self._lost(event)
            case DumpRejected(name, reason):
                self._log.warning(events.DUMP_REJECTED, dump=name, reason=reason)
            case TapSeen() | TapRefused():
                self._on_tap(event)

    def lose_capture(self, rid: str, reason: str, fault: Fault = Fault.ATTEMPT) -> bool:
        """Tell the unit that this attempt's capture will not come. False: no open unit has made that attempt."""
        name = RequestName.parse(rid)
        inbox = self._inboxes.open.get((name.job, name.unit)) if name is not None else None
        if inbox is not None:
            inbox.take_loss(rid, reason, fault)
        return inbox is not None

    def release_parked(self, wanted: AbstractSet[UnitId]) -> None:
        """Release what is parked for units that will not come back."""
        for dump in self._space.drop_parked(wanted):
            self._release(dump)

    def _lost(self, loss: CaptureLost) -> None:
        """Want of room is nobody's fault: the pause is all that answers it, however often it comes."""
        fault = Fault.NOBODY if loss.for_want_of_room else Fault.ATTEMPT
        if loss.for_want_of_room:
            self._on_crowded(loss.rid)
        pause_seconds = self._pause.lost() if self.lose_capture(loss.rid, loss.reason, fault) else 0.0
        self._log.warning(events.DUMP_LOST, rid=loss.rid, reason=loss.reason, pause_seconds=round(pause_seconds, 3))

    def _route(self, dump: Dump) -> None:
        facts = replace(dump.facts, dump_id=f"{self._worker}/{dump.facts.dump_id}")
        match self.router.route(facts):
            case ToUnit(unit, rid):
                self._pause.published()
                self._inboxes.open[unit].take_dump(rid, facts, dump)
                self._on_rows(facts)
            case Parked(unit):
                self._space.park(unit, facts.rid or "", facts, dump)
            case Stray(reason):
                self._release(dump)
                self._metrics.strays_total.labels(worker=self._worker).inc()
                self._log.debug(events.DUMP_STRAY, dump=facts.dump_id, rows=facts.rows, rid=facts.rid, reason=reason)
                self._on_stray(facts)

    def _release(self, dump: Dump) -> None:
        try:
            dump.release()
        except OSError as error:
            tell_of(dump, error, self._log)
            task = asyncio.create_task(release_again(dump, self._clock, self._log), name=f"release {dump.facts.dump_id}")
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
