"""What an examination finds: one line a check, and with everything that is not well, the way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`ok`: as it should be. `note`: worth knowing. `warning`: costs time, room or certainty. `error`: stops or spoils jobs."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome: what was `seen`, and how to `fix` it.

    Raises:
        ValueError: a warning or an error that does not say how to fix it.
    """

    check: str
    severity: Severity
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.severity in (Severity.WARNING, Severity.ERROR) and not self.fix:
            raise ValueError(f"the finding {self.check!r} ({self.seen}) does not say how to fix it")


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """All findings on one worker, in the order of the examination."""

    worker: str
    url: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings on each worker, and those `across` them: what several workers must have in common."""

    reports: tuple[WorkerReport, ...]
    across: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        everything = [*(finding for report in self.reports for finding in report.findings), *self.across]
        return sum(finding.severity is severity for finding in everything)


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Severity.OK, seen)


def note(check: str, seen: str, fix: str = "") -> Finding:
    return Finding(check, Severity.NOTE, seen, fix)


def warning(check: str, seen: str, fix: str) -> Finding:
    return Finding(check, Severity.WARNING, seen, fix)


def error(check: str, seen: str, fix: str) -> Finding:
    return Finding(check, Severity.ERROR, seen, fix)
