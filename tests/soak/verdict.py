"""What a soak is held against: criteria, each met or short, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from tests.soak.readings import Reading, thirds

MOST_GROWTH = 1.05
# Of the readings, the first: meanwhile caches fill, the first units come one after the other, and where two requests to a worker
# overlap, a second connection to it is opened and kept.
WARM_UP = 0.2
# A few things more or less are no growth where there are only some.
COUNTED_APART = 2
MIB = 1 << 20
PROBLEMS_TOLD = 5


@dataclass(frozen=True)
class Criterion:
    """`found` against `wanted`; `problems` are what to look at where it is short."""

    name: str
    found: str
    wanted: str
    met: bool
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Soaked:
    """What a soak found. Every sample ends; `failed` are those that ended otherwise than stored, by their reason's kind."""

    samples: int
    stored: int
    failed: Counter[str]
    unexplained: tuple[str, ...]
    wrong: tuple[str, ...]
    left: tuple[str, ...]
    still_held: tuple[str, ...]
    errors: int
    readings: Sequence[Reading]
    requests: int
    faults: Counter[str]
    kills: int
    seconds: float

    def criteria(self) -> Iterator[Criterion]:
        ended = self.stored + self.failed.total()
        by_reason = "".join(f", {count} {kind}" for kind, count in sorted(self.failed.items()))
        every = f"{self.samples:,}, each with a reason if not stored"
        met = ended == self.samples and not self.unexplained
        yield Criterion("samples that ended", f"{self.stored:,} stored{by_reason}", every, met, self.unexplained)
        yield none("samples stored with other bytes than undisturbed", self.wrong)
        warm = self.readings[int(len(self.readings) * WARM_UP) :]
        yield flat(warm, "memory of its own (RssAnon + RssFile)", "memory", MIB, "MiB")
        yield flat(warm, "resident memory (with mapped dumps)", "rss", MIB, "MiB")
        for counted in ("descriptors", "threads", "tasks"):
            yield flat(warm, counted, counted)
        yield none("dumps, answers and temporary files left", self.left)
        yield none("held by the idle service that was not before", self.still_held)
        yield Criterion("errors in the log that nobody foresaw", str(self.errors), "0", self.errors == 0)

    @property
    def short(self) -> list[Criterion]:
        return [criterion for criterion in self.criteria() if not criterion.met]

    def table(self) -> Table:
        return table(self.criteria(), self._title(), self._caption())

    def _title(self) -> str:
        rate = self.samples / self.seconds
        return f"{self.samples:,} samples in {self.seconds:.0f} s ({rate:.0f}/s), {len(self.readings)} readings"

    def _caption(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        first, last = thirds(self.readings, "workers")
        shared, dumps = (max(getattr(reading, what) for reading in self.readings) / MIB for what in ("shared", "dumps"))
        return (
            f"{self.requests:,} requests, {self.faults.total()} of them disturbed ({kinds}); {self.kills} workers killed. "
            f"At most {shared:.1f} MiB of dumps mapped, {dumps:.1f} MiB in shared memory. "
            f"All workers' memory: {first / MIB:,.0f} → {last / MIB:,.0f} MiB"
        )


def none(name: str, found: tuple[str, ...]) -> Criterion:
    return Criterion(name, str(len(found)), "0", not found, found)


def flat(readings: Sequence[Any], name: str, what: str, unit: int = 1, word: str = "") -> Criterion:
    """Whether an attribute of the readings of a service is the same at the end as at the beginning."""
    first, last = thirds(readings, what)
    most = max(first * MOST_GROWTH, 0 if word else first + COUNTED_APART)
    found = f"{first / unit:,.1f} → {last / unit:,.1f} {word}".rstrip() + f" (x {last / first:.3f})"
    return Criterion(f"service: {name}", found, f"last third ≤ {most / unit:,.1f} {word}".rstrip(), last <= most)


def table(criteria: Iterable[Criterion], title: str, caption: str) -> Table:
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in ("criterion", "found", "wanted", ""):
        made.add_column(column)
    for criterion in criteria:
        verdict = "[green]ok[/green]" if criterion.met else "[red]short[/red]"
        made.add_row(criterion.name, criterion.found, criterion.wanted, verdict)
        for problem in criterion.problems[:PROBLEMS_TOLD]:
            made.add_row("", escape(problem), "", "")
    return made
