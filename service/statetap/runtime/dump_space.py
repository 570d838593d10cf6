"""The room in one worker's dump directory: what open units have reserved, and dumps that are parked for units to come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from statetap.core.dumps import DumpFacts
from statetap.core.routing import UnitId
from statetap.ports import Dump

# What is kept free of a worker's budget: strays and dumps of abandoned attempts stand in the directory for a moment, too.
USABLE_BUDGET = 0.9


class DumpSpace:
    """`budget_bytes` is what the worker's publisher allows itself, `measured` hears of every change of `held_bytes`."""

    def __init__(self, measured: Callable[[int], None]) -> None:
        self.budget_bytes = 0
        self._measured = measured
        self._reserved: dict[UnitId, int] = {}
        self._parked: dict[UnitId, list[tuple[str, DumpFacts, Dump]]] = defaultdict(list)

    @property
    def held_bytes(self) -> int:
        """Bytes reserved for open units, and of parked dumps that no reservation covers yet."""
        parked = sum(self._parked_bytes(unit) for unit in self._parked if unit not in self._reserved)
        return sum(self._reserved.values()) + parked

    @property
    def capacity_bytes(self) -> int:
        """What open units may take of the directory together."""
        return int(self.budget_bytes * USABLE_BUDGET)

    def fits(self, unit: UnitId, nbytes: int) -> bool:
        """Whether a reservation of `nbytes` for `unit` can be made now (in place of one that it may have)."""
        mine = self._reserved.get(unit, 0) or self._parked_bytes(unit)
        return self.held_bytes - mine + nbytes <= self.capacity_bytes

    def reserve(self, unit: UnitId, nbytes: int) -> None:
        self._reserved[unit] = nbytes
        self._measured(self.held_bytes)

    def holds(self, unit: UnitId) -> bool:
        """Whether a unit has a reservation here."""
        return unit in self._reserved

    def free(self, unit: UnitId) -> None:
        """Give a unit's reservation back; nothing happens if it has none."""
        if self._reserved.pop(unit, None) is not None:
            self._measured(self.held_bytes)

    def park(self, unit: UnitId, rid: str, facts: DumpFacts, dump: Dump) -> None:
        self._parked[unit].append((rid, facts, dump))
        self._measured(self.held_bytes)

    def take_parked(self, unit: UnitId) -> list[tuple[str, DumpFacts, Dump]]:
        """The parked dumps of a unit, (rid, facts, dump). They are the caller's from now on, and stay counted until `free`."""
        if unit in self._parked:
            self._reserved.setdefault(unit, self._parked_bytes(unit))
        return self._parked.pop(unit, [])

    def drop_parked(self, wanted: AbstractSet[UnitId]) -> list[Dump]:
        """What is parked for units that will not come back: it is to be released."""
        unwanted = [unit for unit in self._parked if unit not in wanted]
        dumps = [dump for unit in unwanted for _, _, dump in self._parked.pop(unit)]
        self._measured(self.held_bytes)
        return dumps

    def _parked_bytes(self, unit: UnitId) -> int:
        return sum(facts.nbytes for _, facts, _ in self._parked.get(unit, ()))
