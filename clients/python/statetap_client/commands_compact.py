"""`statetap compact`: the same store, about a third smaller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from statetap_client.output import size
from statetap_client.progress import LINE_SECONDS

if TYPE_CHECKING:
    from statetap_client.compact import CompactReport, Progress


def compact(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The store's directory.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where the compact store goes; nothing may be there.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Shards at a time, each in memory. Default: one a core, at most 8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a compressed copy of a store, verifying every sample. Exits 0 if it is there, 1 if a sample or the disk fails."""
    # Late, so that `--help` does not wait for zarr.
    from statetap_client import compact as compacting
    from statetap_client.reader import NotAStore, StoreReadError

    try:
        with _progress(shown=not as_json) as advance:
            report = compacting.compact(source, target, threads=threads, progress=advance)
    except NotAStore as e:
        raise typer.BadParameter(str(e), param_hint="SRC") from e
    except (compacting.CannotCompact, StoreReadError, OSError) as e:
        typer.echo(f"not compacted: {e}", err=True)
        raise typer.Exit(1) from e
    if as_json:
        typer.echo(orjson.dumps({**asdict(report), "ratio": report.ratio}))
    else:
        _print(report, source, target)


def _print(report: CompactReport, source: Path, target: Path) -> None:
    typer.echo(f"source: {source}: {size(report.source_bytes)} ({report.source_bytes} bytes)")
    typer.echo(f"target: {target}: {size(report.target_bytes)} ({report.target_bytes} bytes)")
    typer.echo(f"ratio: {report.ratio:.3f}; {report.samples} stored samples, every digest verified")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Progress]:
    """On standard error, a bar on a terminal and a line every few seconds where that is piped."""
    console = Console(stderr=True)
    if not shown:
        yield lambda done, total: None
    elif not console.is_terminal:
        yield _lines(lambda text: typer.echo(text, err=True))
    else:
        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with ProgressBar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("compacting", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(write: Callable[[str], None], monotonic: Callable[[], float] = time.monotonic) -> Progress:
    due = monotonic() + LINE_SECONDS

    def advance(done: int, total: int) -> None:
        nonlocal due
        if monotonic() >= due:
            due = monotonic() + LINE_SECONDS
            write(f"compacting: {size(done)} of {size(total)}")

    return advance
