"""The L2 norms of hidden states, layer by layer: what a job has seen of them, and which captures are out of all proportion.

A vector of the wrong scale, or of memory that never held a hidden state, is finite and not constant; what gives it away is that
nothing of its size was seen before in that layer. First rows are kept apart: as attention sinks, they have norms hundreds of
times those of the rows after them in many models, and one range for both would let nearly everything pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isclose
from typing import Any

from statetap.core.capture import Refusal, RefusalReason
from statetap.core.requests import RequestName

# Rows of a capture whose norms are taken: the first, the last, and one for so many between, up to so many in all. One norm costs
# what the other checks of several rows do.
ROWS_FOR_EACH_SAMPLED = 256
MOST_SAMPLED_ROWS = 16
# Before it has seen so many captures, a job does not know how far its norms spread.
ENOUGH_CAPTURES = 64
# Norms of ordinary rows of a layer stay within a small factor of each other; a wrong scale or foreign memory is off by far more.
MARGIN = 8.0
# Two attempts at a sample give the same norms, up to rounding: kernels that add up in another order differ by a percent at most.
AGREEMENT = 0.05


def sampled_rows(rows: int) -> tuple[int, ...]:
    """The rows, of so many, whose norms are taken: spread evenly, the first and the last among them."""
    count = min(rows, 2 + rows // ROWS_FOR_EACH_SAMPLED, MOST_SAMPLED_ROWS)
    return tuple(i * (rows - 1) // max(count - 1, 1) for i in range(count))


@dataclass(frozen=True, slots=True)
class ArrayNorms:
    """Of one hidden array of one capture: `norms[i][k]` is that of row `rows[i]` in layer slot k (a final state has one slot)."""

    array: str
    rows: tuple[int, ...]
    norms: tuple[tuple[float, ...], ...]


class RowKind(StrEnum):
    """A capture's first row, or any after it."""

    FIRST = "first"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class NormSummary:
    """Of `count` norms: the least, the largest, and the sum."""

    count: int
    least: float
    largest: float
    total: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class NormTable:
    """Summaries by array, kind of row and layer slot. As data for JSON: `{array: {kind: [[count, least, largest, sum], …]}}`."""

    def __init__(self) -> None:
        # As the data has them, and changed in place: every capture changes all of them.
        self._layers: dict[tuple[str, RowKind], list[list[float]]] = {}

    def add_capture(self, capture: Sequence[ArrayNorms]) -> None:
        for array in capture:
            for row, norms in zip(array.rows, array.norms, strict=True):
                for summary, norm in zip(self._of(array.array, _kind(row), len(norms)), norms, strict=True):
                    summary[0] += 1
                    # `min` and `max` would take longer than all the rest.
                    if norm < summary[1]:  # noqa: PLR1730
                        summary[1] = norm
                    if norm > summary[2]:  # noqa: PLR1730
                        summary[2] = norm
                    summary[3] += norm

    def add_data(self, data: Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]) -> None:
        for array, kinds in data.items():
            for kind, layers in kinds.items():
                for summary, added in zip(self._of(array, RowKind(kind), len(layers)), layers, strict=True):
                    count, least, largest, total = added
                    summary[:] = summary[0] + count, min(summary[1], least), max(summary[2], largest), summary[3] + total

    def as_data(self) -> dict[str, dict[str, list[list[float]]]]:
        """To six digits."""
        data: dict[str, dict[str, list[list[float]]]] = {}
        for (array, kind), layers in self._layers.items():
            data.setdefault(array, {})[kind.value] = [
                [count, *(float(f"{value:.6g}") for value in values)] for count, *values in layers
            ]
        return data

    def rows(self) -> Iterator[tuple[str, int, RowKind, NormSummary]]:
        """(array, layer slot, kind of row, summary), array by array and in each layer by layer."""
        for array in dict.fromkeys(name for name, _ in self._layers):
            kinds = [kind for kind in RowKind if (array, kind) in self._layers]
            for slot in range(len(self._layers[array, kinds[0]])):
                for kind in kinds:
                    count, *values = self._layers[array, kind][slot]
                    yield array, slot, kind, NormSummary(int(count), *values)

    def ranges(self, array: str, kind: RowKind) -> Sequence[tuple[float, float]]:
        """(least, largest) by layer slot, once enough captures and enough rows of that kind were seen to hold others against."""
        first, layers = self._layers.get((array, RowKind.FIRST)), self._layers.get((array, kind))
        # Every capture has one first row.
        if first is None or layers is None or min(first[0][0], layers[0][0]) < ENOUGH_CAPTURES:
            return ()
        return [(least, largest) for _, least, largest, _ in layers]

    def _of(self, array: str, kind: RowKind, slots: int) -> list[list[float]]:
        if (array, kind) not in self._layers:
            self._layers[array, kind] = [[0, inf, 0.0, 0.0] for _ in range(slots)]
        return self._layers[array, kind]


class JobNorms:
    """Of one job: what is `stored`, for its report, and what captures are held against: those and what was accepted since."""

    def __init__(self) -> None:
        self.stored = NormTable()
        self._seen = NormTable()
        self._refused: dict[int, list[Sequence[ArrayNorms]]] = defaultdict(list)

    def refusal(self, sample: int, capture: Sequence[ArrayNorms]) -> Refusal | None:
        """Why this capture of a sample must be tried again, if so: a norm is out of all proportion to what the job has seen.

        Not if an earlier attempt at the same sample gave the same norms: what comes out twice is what the model computes there.
        """
        fault = self._fault(capture)
        if fault is None or any(_agree(capture, earlier) for earlier in self._refused.get(sample, ())):
            return None
        self._refused[sample].append(capture)
        return Refusal(RefusalReason.BAD_VALUES, fault)

    def accepted(self, sample: int, capture: Sequence[ArrayNorms]) -> None:
        """A capture is to be stored: the job has seen it."""
        self._refused.pop(sample, None)
        self._seen.add_capture(capture)

    def committed(self, data: Mapping[str, Any]) -> None:
        """Captures that were accepted before are stored now; `data` as `NormTable` gives it."""
        self.stored.add_data(data)

    def replay(self, data: Mapping[str, Any]) -> None:
        """Captures were stored before this service began."""
        self.stored.add_data(data)
        self._seen.add_data(data)

    def _fault(self, capture: Sequence[ArrayNorms]) -> str | None:
        for array in capture:
            ranges = {kind: self._seen.ranges(array.array, kind) for kind in RowKind}
            for row, norms in zip(array.rows, array.norms, strict=True):
                for slot, (least, largest) in enumerate(ranges[_kind(row)]):
                    if not least / MARGIN <= norms[slot] <= largest * MARGIN:
                        layer = f" in layer {slot + 1} of {len(norms)}" if len(norms) > 1 else ""
                        rows = " in first rows" if _kind(row) is RowKind.FIRST else ""
                        return (
                            f"{array.array}: row {row} has a norm of {norms[slot]:.3g}{layer}, "
                            f"the job has seen {least:.3g} to {largest:.3g}{rows}"
                        )
        return None


class UnitNorms:
    """Of one unit in work: judges its captures by what the job has seen, and keeps those that are to be stored."""

    def __init__(self, job: JobNorms) -> None:
        self._job = job
        self._judged: dict[str, Sequence[ArrayNorms]] = {}
        self._accepted = NormTable()

    def refusal(self, rid: str, capture: Sequence[ArrayNorms]) -> Refusal | None:
        """As `JobNorms` judges the capture of attempt `rid`."""
        refusal = self._job.refusal(_sample(rid), capture)
        if refusal is None:
            self._judged[rid] = capture
        return refusal

    def accepted(self, rid: str) -> None:
        """The capture of attempt `rid`, which was not refused, is its sample's."""
        capture = self._judged.pop(rid)
        self._job.accepted(_sample(rid), capture)
        self._accepted.add_capture(capture)

    def as_data(self) -> dict[str, Any]:
        """Of all captures that were accepted, as `NormTable` gives it."""
        return self._accepted.as_data()


def _sample(rid: str) -> int:
    name = RequestName.parse(rid)
    if name is None:
        raise ValueError(f"{rid!r} names no attempt at a sample")
    return name.sample


def _kind(row: int) -> RowKind:
    return RowKind.LATER if row else RowKind.FIRST


def _agree(capture: Sequence[ArrayNorms], other: Sequence[ArrayNorms]) -> bool:
    """Of two attempts at one sample, so that the rows are the same."""
    pairs = zip(
        (norm for array in capture for norms in array.norms for norm in norms),
        (norm for array in other for norms in array.norms for norm in norms),
        strict=True,
    )
    return all(isclose(norm, earlier, rel_tol=AGREEMENT) for norm, earlier in pairs)
