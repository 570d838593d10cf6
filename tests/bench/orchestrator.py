"""What the orchestrator itself costs: between two requests, per request, and on its event loop while it writes.

Every figure is of a real service process over `stand_ins`. A worker's times are the stand-ins': from a request's last byte to its
answer's first one it has a request in flight, and what the service takes in between is a gap, its wake-ups included.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from statetap_client.schemas import Job

from tests.bench.measures import Peak, cpu_seconds, memory_bytes
from tests.bench.rows import Row
from tests.bench.served import Served, Shape, make_dataset, served

# Each sample in units of so many, as for a sample of 600 tokens and four states of a hidden size of 7168.
SAMPLES_PER_UNIT = 8
TOKENS = 100
ROWS_APART = 128
LONG = 8192
WIDE = 7168


@dataclass(frozen=True, slots=True)
class Run:
    """What a job of one run came to: by worker, and of the service's process."""

    arrived: list[NDArray[np.int64]]
    published: list[NDArray[np.int64]]
    answered: list[NDArray[np.int64]]
    cpu_seconds: float

    @property
    def requests(self) -> int:
        return sum(map(len, self.arrived))

    @property
    def share_in_flight(self) -> float:
        """Of the time between a worker's first and last request, less the tenths at both ends; the workers' mean."""
        shares = []
        for arrived, answered in zip(self.arrived, self.answered, strict=True):
            first, last = len(arrived) // 10, len(arrived) * 9 // 10
            shares.append((answered - arrived)[first:last].sum() / (arrived[last] - arrived[first]))
        return float(np.mean(shares))

    @property
    def gap_milliseconds(self) -> NDArray[np.float64]:
        """From each answer to the worker's next request."""
        return np.concatenate([(a[1:] - b[:-1]) / 1e6 for a, b in zip(self.arrived, self.answered, strict=True)])

    @property
    def reaction_milliseconds(self) -> NDArray[np.float64]:
        """From each dump's rename to the worker's next request."""
        return np.concatenate([(a[1:] - b[:-1]) / 1e6 for a, b in zip(self.arrived, self.published, strict=True)])


def rows(disk: Path, seconds: float) -> list[Row]:
    """Every row takes about so many seconds."""
    strict = _run(disk, Shape(workers=1, delay=0.02, plain=True), seconds)
    late = _run(disk, Shape(workers=1, delay=0.02, plain=True, lag=0.01), seconds)
    few = _run(disk, Shape(workers=8, delay=0.05), seconds)
    many = _run(disk, Shape(workers=64, delay=0.2), seconds)
    return [
        Row(
            "rename of a dump to the next request on the wire, strict mode, p50",
            float(np.median(strict.reaction_milliseconds)),
            "ms",
            at_most=2,
            details={"the same, dump 10 ms after its answer, ms": float(np.median(late.reaction_milliseconds))},
        ),
        _share("8 workers at 50 ms", few, 0.98),
        _share("64 workers at 200 ms", many, 0.97),
        Row(
            "orchestrator CPU per request, 8 workers at 50 ms",
            few.cpu_seconds / few.requests * 1e3,
            "ms",
            at_most=1.5,
            details={
                "load of the machine afterwards": os.getloadavg()[0],
                "orchestrator CPU per request, 64 workers, ms": many.cpu_seconds / many.requests * 1e3,
            },
        ),
        *_while_writing(disk),
    ]


def _share(what: str, run: Run, target: float) -> Row:
    gaps = run.gap_milliseconds
    details = {f"{what}: gap, p50, ms": float(np.median(gaps)), f"{what}: gap, p99, ms": float(np.percentile(gaps, 99))}
    return Row(f"share of time with a request in flight, {what}", run.share_in_flight, "", at_least=target, details=details)


def _run(disk: Path, shape: Shape, seconds: float) -> Run:
    """One job of samples of unlike lengths, as many as take the workers so long at best."""
    with served(disk, shape) as run:
        make_dataset(run.folder / "data", [TOKENS + number % 5 for number in range(int(shape.workers * seconds / shape.delay))])
        client = run.start_service()
        run.wait_for_workers(client)
        used = cpu_seconds(run.pid)
        rows_per_shard = ROWS_APART * SAMPLES_PER_UNIT
        job = run.submit(client, "stored", rows_per_shard=rows_per_shard, rows_per_chunk=ROWS_APART)
        _require_stored(client.wait(job.id, poll_seconds=1.0))
        used = cpu_seconds(run.pid) - used
        return _what_was(run, used)


def _what_was(run: Served, used: float) -> Run:
    moments = run.moments()
    # A fence in strict mode publishes and answers like any request.
    arrived, published, answered = (
        [np.array(worker[what], np.int64) for worker in moments.values()] for what in ("arrived", "published", "answered")
    )
    return Run(arrived, published, answered, used)


def _require_stored(job: Job) -> None:
    if job.state != "completed" or job.progress.samples.failed:
        raise RuntimeError(f"the job is {job.state}: {job.reason}, {job.failures}; its figures would mean nothing")


def _while_writing(disk: Path, samples: int = 6) -> list[Row]:
    """The loop and the memory of a service that writes samples of 470 MB."""
    shape = Shape(workers=1, delay=0.5, hidden=WIDE, longest=LONG, budget_bytes=4 << 30)
    with served(disk, shape) as run:
        make_dataset(run.folder / "data", [LONG] * samples)
        lags = run.folder / "lags.json"
        client = run.start_service(module="tests.bench.watched_service", arguments=["--lags", str(lags)])
        run.wait_for_workers(client)
        idle = memory_bytes(run.pid, "RssAnon", "RssShmem")
        with Peak(lambda: memory_bytes(run.pid, "RssAnon", "RssShmem")) as held:
            job = run.submit(client, "stored")
            _require_stored(client.wait(job.id, poll_seconds=0.2))
        began = run.moments()["w0"]["arrived"][0]
        run.stop_service()
        late = np.array([lag for at, lag in json.loads(lags.read_text()) if at >= began]) * 1e3
    return [
        Row(
            "event-loop stall while writing samples of 470 MB, p99",
            float(np.percentile(late, 99)),
            "ms",
            at_most=5,
            details={"event-loop stall while writing, p50, ms": float(np.median(late)), "the longest, ms": float(late.max())},
        ),
        Row(
            "anonymous and shared memory above idle while writing samples of 470 MB",
            (held.highest - idle) / 1e6,
            "MB",
            at_most=150,
            details={"the same when idle, MB": idle / 1e6},
        ),
    ]
