"""What `statetap doctor` prints: a table a worker on a terminal, a line a finding when piped, or one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statetap.runtime.doctor.findings import Diagnosis, Finding, Severity

_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
ACROSS = "all workers"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "ok": not diagnosis.count(Severity.ERROR),
        "workers": [asdict(report) for report in diagnosis.reports],
        "across": [asdict(finding) for finding in diagnosis.across],
    }


def print_diagnosis(diagnosis: Diagnosis) -> None:
    sections = [(f"{report.worker} ({report.url})", report.worker, report.findings) for report in diagnosis.reports]
    if diagnosis.across:
        sections.append((ACROSS, ACROSS, diagnosis.across))
    for title, name, findings in sections:
        if sys.stdout.isatty():
            _print_table(title, findings)
        else:
            for finding in findings:
                fix = f" To fix it: {finding.fix}." if finding.fix else ""
                typer.echo(f"{name}: {finding.severity}: {finding.check}: {finding.seen}.{fix}")
    typer.echo(summary(diagnosis))


def summary(diagnosis: Diagnosis) -> str:
    workers = len(diagnosis.reports)
    counted = [
        f"{count} {severity}{'' if count == 1 else 's'}"
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        if (count := diagnosis.count(severity))
    ]
    return f"{workers} worker{'' if workers == 1 else 's'} examined: {', '.join(counted) or 'all is well'}"


def _print_table(title: str, findings: Sequence[Finding]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("seen, and how to fix it", overflow="fold")
    for finding in findings:
        told = Text(finding.seen)
        if finding.fix:
            told.append(f"\n→ {finding.fix}", style="italic")
        table.add_row(Text(str(finding.severity), style=_STYLES[finding.severity]), finding.check, told)
    console = Console()
    console.print(table)
    console.print()
