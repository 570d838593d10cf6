"""What became of one schedule of faults, and the table of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.table import Table


@dataclass(frozen=True)
class Outcome:
    """One schedule: `faults` that took effect, samples by how they ended, and `problems`, of which there must be none.

    `level` is `virtual` (the runtime over fakes, in virtual time) or `processes` (a service and workers that are real).
    """

    level: str
    seed: int
    faults: tuple[str, ...]
    samples: int
    stored: int
    failed: Mapping[str, int] = field(default_factory=dict)
    asked_again: int = 0
    seconds: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        failed = ", ".join(f"{count} {kind}" for kind, count in sorted(self.failed.items()))
        ended = f"{self.stored} of {self.samples} stored" + (f", failed: {failed}" if failed else "")
        word = "WRONG" if self.problems else "ok"
        return f"{self.level} {self.seed}: {word}; {' + '.join(self.faults) or 'no fault'}; {ended}; {self.seconds:.1f} s"


def table(outcomes: Iterable[Outcome]) -> Table:
    """Faults by outcomes. A schedule with several faults counts in the row of each."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        for fault in sorted(set(outcome.faults)) or ["(none)"]:
            rows.setdefault((outcome.level, fault), []).append(outcome)
    made = Table(title="what became of each fault's schedules", title_justify="left")
    for column in ("level", "fault"):
        made.add_column(column)
    for column in ("schedules", "samples", "stored", "failed, as explained", "asked again", "wrong"):
        made.add_column(column, justify="right")
    for (level, fault), having in sorted(rows.items()):
        failed: Counter[str] = Counter()
        for outcome in having:
            failed.update(outcome.failed)
        wrong = sum(bool(outcome.problems) for outcome in having)
        made.add_row(
            level,
            fault,
            str(len(having)),
            str(sum(outcome.samples for outcome in having)),
            str(sum(outcome.stored for outcome in having)),
            ", ".join(f"{count} {kind}" for kind, count in sorted(failed.items())) or "0",
            str(sum(outcome.asked_again for outcome in having)),
            f"[red]{wrong}[/red]" if wrong else "0",
        )
    return made
