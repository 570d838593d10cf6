"""What commands print on standard output: JSON, a table on a terminal, tab-separated lines when piped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import orjson
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statetap_client.schemas import Job

NORM_COLUMNS = ("norms of", "layer", "rows", "sampled", "min", "mean", "max")
MINUTE, HOUR, DAY = 60, 3600, 86400


def print_json(answer: BaseModel | Sequence[BaseModel]) -> None:
    """One document: an object, or a list of them."""
    plain = answer.model_dump(mode="json") if isinstance(answer, BaseModel) else [a.model_dump(mode="json") for a in answer]
    typer.echo(orjson.dumps(plain, option=orjson.OPT_INDENT_2))


def print_json_line(answer: BaseModel) -> None:
    """One line of many, for lists without a bound."""
    typer.echo(answer.model_dump_json())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_job(job: Job) -> None:
    """All that there is to say of one job, a line each, and the norms of its hidden states as a table."""
    progress = job.progress
    lines = {
        "job": f"{job.id} ({job.name})",
        "state": job.state if job.reason is None else f"{job.state}: {job.reason}",
        "store": job.store,
        "dataset": job.dataset,
        "model": job.model_path,
        "captures": f"layers {', '.join(map(str, job.aux_layer_ids)) or 'none'}; final {job.final}; {job.dtype}",
        "samples": sample_counts(job),
        "tokens": f"{progress.tokens_stored:,} of {progress.tokens_total:,}, {progress.tokens_per_second:,.0f}/s",
        "bytes": f"{size(progress.bytes_stored)} of {size(progress.bytes_total)}, {size(progress.bytes_per_second)}/s",
        "time left": duration(progress.eta_seconds),
    }
    for name, text in lines.items():
        typer.echo(f"{name:10} {text}")
    for reason, count in job.failures.items():
        typer.echo(f"{'failures':10} {reason}: {count:,}")
    for worker, tally in job.workers.items():
        typer.echo(f"{'worker':10} {worker}: {', '.join(f'{count:,} {what}' for what, count in tally.items())}")
    if job.layer_norms:
        typer.echo()
        print_table(NORM_COLUMNS, _norm_rows(job))


def _norm_rows(job: Job) -> Iterable[Sequence[str]]:
    for array, layers in job.layer_norms.items():
        for norms in layers:
            figures = (f"{norm:.4g}" for norm in (norms.min, norms.mean, norms.max))
            yield array, "" if norms.layer is None else str(norms.layer), norms.rows, f"{norms.count:,}", *figures


def sample_counts(job: Job) -> str:
    """How many samples are stored, and of the others those that there are."""
    counts = job.progress.samples
    others = {"failed": counts.failed, "skipped": counts.skipped, "cancelled": counts.cancelled}
    told = [f"{counts.stored:,} of {counts.total:,} stored", *(f"{n:,} {name}" for name, n in others.items() if n)]
    return ", ".join(told)


def size(nbytes: float) -> str:
    """Bytes in decimal units, three figures or so."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} PB"


def duration(seconds: float | None) -> str:
    """The two largest units of it; `unknown` for None."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"
