"""A row of the bench: a figure, what it is held against, and whether it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "short", "report"]


@dataclass(frozen=True, slots=True)
class Row:
    """`value` in `unit`; the target is at least or at most a number, or there is none. `details` are figures behind it."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "report" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def verdict(self) -> Verdict:
        if self.at_least is not None:
            return "ok" if self.value >= self.at_least else "short"
        if self.at_most is not None:
            return "ok" if self.value <= self.at_most else "short"
        return "report"

    @property
    def reached(self) -> float | None:
        """How much of the target is reached: 1 is just so, whichever way the target points."""
        if self.at_least is not None:
            return self.value / self.at_least
        return None if self.at_most is None else self.at_most / self.value
