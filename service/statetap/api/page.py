"""The status page: jobs and workers in two tables, rendered here, without a script. Every value is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from statetap.runtime.views import JobView, WorkerView

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } a { color: #0b62c4; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .35rem .8rem .35rem 0; }
th { border-bottom: 2px solid #c9d1db; font-weight: 600; } td { border-bottom: 1px solid #e4e8ee; vertical-align: top; }
.empty { color: #66707d; }
@media (prefers-color-scheme: dark) { body { background: #14181e; color: #dde3ea; } a { color: #6fb1ff; } }
"""
JOB_COLUMNS = ("Job", "Name", "State", "Samples stored", "Failed", "Tokens/s", "Time left")
WORKER_COLUMNS = ("Worker", "State", "URL", "Requests", "Failures", "Reason")


def render_page(jobs: Sequence[JobView], workers: Sequence[WorkerView]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>Statetap</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Statetap</h1>
<h2>Jobs</h2>
{_table(JOB_COLUMNS, map(_job_cells, jobs))}
<h2>Workers</h2>
{_table(WORKER_COLUMNS, map(_worker_cells, workers))}
<p><a href="/openapi.json">API</a> · <a href="/metrics">Metrics</a> · <a href="/readyz">Readiness</a></p>
</body>
</html>
"""


def _job_cells(view: JobView) -> tuple[str, ...]:
    record, counts = view.record, view.record.counts
    left = "" if view.eta_seconds is None else f"{view.eta_seconds:,.0f} s"
    stored = f"{counts.stored:,} of {counts.samples:,}"
    return record.id, record.name, record.state.value, stored, f"{counts.failed:,}", f"{view.tokens_per_second:,.0f}", left


def _worker_cells(view: WorkerView) -> tuple[str, ...]:
    record = view.record
    return record.name, view.state.value, record.url, f"{view.requests:,}", f"{view.failures:,}", view.reason or ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return '<p class="empty">None yet.</p>'
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
