"""A job's progress on standard error: a live display on a terminal, a plain line every few seconds when piped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from statetap_client.output import duration, sample_counts, size
from statetap_client.schemas import Job

LINE_SECONDS = 5.0


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Callable[[Job], None]]:
    """Within it, call what it gives with each new view of the job."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda job: live.update(display(job))
    else:
        yield ProgressLines(console)


class ProgressLines:
    """A line at the first look, at every change of state, and else every `LINE_SECONDS`."""

    def __init__(self, console: Console, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic = monotonic
        self._state: str | None = None
        self._next = 0.0

    def __call__(self, job: Job) -> None:
        now = self._monotonic()
        if job.state == self._state and now < self._next:
            return
        self._state, self._next = job.state, now + LINE_SECONDS
        text = Text(f"{job.id} {job.state}: {sample_counts(job)}; {rates(job)}")
        self._console.print(text, soft_wrap=True)


def display(job: Job) -> RenderableType:
    """Name and state, a bar of samples, rates, failures by reason, workers."""
    counts = job.progress.samples
    ended = counts.total - counts.pending
    lines: list[RenderableType] = [
        Text.assemble((job.name, "bold"), f"  {job.id}  ", (job.state, "cyan"), f"  {job.reason or ''}"),
        ProgressBar(total=max(counts.total, 1), completed=ended, width=60),
        Text(f"{sample_counts(job)}; {rates(job)}"),
    ]
    lines += [Text(f"  {reason}: {count:,}", style="red") for reason, count in job.failures.items()]
    for worker, tally in job.workers.items():
        lines.append(Text(f"  {worker}: {', '.join(f'{count:,} {what}' for what, count in tally.items())}", style="dim"))
    return Group(*lines)


def rates(job: Job) -> str:
    progress = job.progress
    told = f"{progress.tokens_per_second:,.0f} tokens/s, {size(progress.bytes_per_second)}/s"
    return told if progress.eta_seconds is None else f"{told}, {duration(progress.eta_seconds)} left"
