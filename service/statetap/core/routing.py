"""Whose is this dump? Every dump of a worker is routed once: to an open unit, to one that is still to come back, or nowhere.

A dump that belongs to nobody is a stray: warm-up, health check, decode pass, foreign traffic, an abandoned attempt.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from statetap.core.dumps import DumpFacts
from statetap.core.requests import RequestName

UnitId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ToUnit:
    """For the open unit, as a dump of the attempt `rid`."""

    unit: UnitId
    rid: str


@dataclass(frozen=True, slots=True)
class Parked:
    """For a unit that was open when the service last stopped and was not leased again yet: keep it."""

    unit: UnitId


@dataclass(frozen=True, slots=True)
class Stray:
    reason: str


Route = ToUnit | Parked | Stray


@dataclass(slots=True)
class DumpRouter:
    """The routes of one worker's dumps. `open_units` are leased here, `expected_back` were leased before the service stopped.

    By count there is no name to go by: all that appears between `begin_lifecycle` and `end_lifecycle` is a candidate.
    """

    open_units: AbstractSet[UnitId]
    expected_back: AbstractSet[UnitId]
    lifecycle: str | None = None

    def begin_lifecycle(self, rid: str) -> None:
        self.lifecycle = rid

    def end_lifecycle(self) -> None:
        self.lifecycle = None

    def route(self, dump: DumpFacts) -> Route:
        rid = dump.rid if dump.rid is not None else self.lifecycle
        if rid is None:
            return Stray("no request was in flight")
        name = RequestName.parse(rid)
        if name is None:
            return Stray("not a request of this service")
        unit = (name.job, name.unit)
        if unit in self.open_units:
            return ToUnit(unit, rid)
        if unit in self.expected_back:
            return Parked(unit)
        return Stray("its unit is not open")
