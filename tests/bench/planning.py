"""A job of a million samples: how long it takes to plan, in how much memory, and how soon it goes on after a start."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

from statetap.core.records import SampleStatus, UnitState
from statetap.runtime.tally import CommitReport
from statetap.runtime.views import WorkerTally
from statetap.telemetry import events
from statetap_client.schemas import JobRequest, PlacementChoice

from tests.bench.measures import Peak, cpu_seconds, memory_bytes
from tests.bench.rows import Row
from tests.bench.served import DATASET, Served, Shape, make_dataset, served, wait_until

# As for a model of hidden size 7168 with four states: 23 samples of 200 tokens a unit.
ROWS_PER_SHARD = 4608
HIDDEN = 8
ROW_BYTES = 4 * HIDDEN * 2
TOKENS = 200
NEVER_SECONDS = 86_400.0


def rows(disk: Path, samples: int) -> list[Row]:
    with served(disk, Shape(workers=1, delay=NEVER_SECONDS, hidden=HIDDEN)) as run:
        make_dataset(run.folder / "data", [TOKENS] * samples)
        planned = _plan(run)
        _settle_half(run.folder / "data" / "ledger.db", run)
        return [*planned, _start(run, samples)]


def _plan(run: Served) -> list[Row]:
    client = run.start_service(timeout_seconds=600)
    run.wait_for_workers(client)
    idle = memory_bytes(run.pid, "VmRSS")
    used = cpu_seconds(run.pid)
    with Peak(lambda: memory_bytes(run.pid, "VmRSS")) as resident, Peak(lambda: memory_bytes(run.pid, "RssAnon")) as anonymous:
        began = time.monotonic()
        placement = PlacementChoice(rows_per_shard=ROWS_PER_SHARD)
        job = client.submit(JobRequest(dataset=DATASET, store="stored", placement=placement, ignore_space=True))
        answered = time.monotonic() - began
        wait_until("job is planned", lambda: client.job(job.id).state != "planning")
        took = time.monotonic() - began
    used = cpu_seconds(run.pid) - used
    run.kill_service()
    return [
        Row(
            f"planning {job.progress.samples.total:,} samples of {TOKENS} tokens, until the job runs",
            took,
            "s",
            at_most=60,
            details={"planning, until the submission is answered, s": answered, "planning, CPU seconds": used},
        ),
        Row(
            "the same, resident memory at its highest (VmRSS, mapped files included)",
            resident.highest / 1e9,
            "GB",
            at_most=1.0,
            details={
                "planning, resident memory before, GB": idle / 1e9,
                "planning, anonymous memory, GB": anonymous.highest / 1e9,
            },
        ),
    ]


def _settle_half(ledger: Path, run: Served) -> None:
    """Record the first half of the units as committed, with all that a commit leaves in the ledger. In bulk, past the service."""
    with sqlite3.connect(ledger) as connection:
        job, name, total = connection.execute("SELECT number, id, units_total FROM jobs").fetchone()
        half = (job, total // 2)
        connection.execute(
            "UPDATE units SET state = ?, fence = 1, committed_at = ?, owner = NULL, expires_at = NULL WHERE job = ? AND unit < ?",
            (UnitState.COMMITTED, time.time(), *half),
        )
        connection.execute(
            "UPDATE samples SET status = ?, attempts = 1, worker = 'w0', next_token = 7, digest = 1 WHERE job = ? AND unit < ?",
            (SampleStatus.STORED, *half),
        )
        units = connection.execute(
            "SELECT unit, count(*), sum(length) FROM samples WHERE job = ? AND unit < ? GROUP BY unit", half
        )
        reports = [
            (unit, CommitReport(count, 0, tokens, 64 * tokens, {"w0": WorkerTally(count, count)}))
            for unit, count, tokens in units
        ]
        connection.executemany(
            "INSERT INTO events (job, name, at, data) VALUES (?, ?, ?, ?)",
            ((name, events.UNIT_COMMITTED, time.time(), json.dumps(report.as_event(unit))) for unit, report in reports),
        )
        stored, tokens = (sum(getattr(report, what) for _, report in reports) for what in ("stored", "tokens"))
        connection.execute(
            "UPDATE jobs SET pending = pending - ?, stored = ?, tokens_stored = ?, bytes_stored = ?, units_committed = ? "
            "WHERE number = ?",
            (stored, stored, tokens, ROW_BYTES * tokens, len(reports), job),
        )
    connection.close()


def _start(run: Served, samples: int) -> Row:
    before = len(run.moments()["w0"]["arrived"])
    began = time.monotonic()
    run.start_service()
    listening = time.monotonic() - began
    wait_until("a request on the wire", lambda: len(run.moments()["w0"]["arrived"]) > before)
    sent = run.moments()["w0"]["arrived"][before] / 1e9 - began
    return Row(
        f"start with a half-done job of {samples:,} samples, until its first request",
        sent,
        "s",
        at_most=5,
        details={"the same, until the service listens, s": listening, "the same, CPU seconds": cpu_seconds(run.pid)},
    )
