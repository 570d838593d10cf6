"""The commit of a unit: how every sample of it ended, and the objects that hold it, in one transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, bindparam, insert, select, update

from statetap.adapters.ledger.bulk import insert_rows
from statetap.adapters.ledger.counts import add_counts, counter_of
from statetap.adapters.ledger.database import Database, writing
from statetap.adapters.ledger.schema import events, samples, shard_objects, units
from statetap.adapters.ledger.units import held_unit
from statetap.core.records import JobCounts, SampleStatus, SampleVerdict, ShardObject, UnitLease, UnitState
from statetap.ports import CommitEvent, LeaseLost, LedgerError

_Placed = Mapping[int, tuple[SampleStatus, int]]
"""The samples of a unit: status so far, and tokens."""


# Made once: to put a statement together takes longer than to run it.
_PLACED = select(samples.c.sample, samples.c.status, samples.c.length).where(
    samples.c.job == bindparam("job_number"), samples.c.unit == bindparam("index")
)
_COMMIT = (
    update(units)
    .where(units.c.job == bindparam("job_number"), units.c.unit == bindparam("index"))
    .values(state=UnitState.COMMITTED, committed_at=bindparam("at"), owner=None, expires_at=None)
)
_JUDGE = update(samples).where(samples.c.job == bindparam("job_number"), samples.c.sample == bindparam("judged"))
_SAY = insert(events)


class SqlCommits:
    """The port's `commit_unit`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @writing
    def commit_unit(
        self,
        connection: Connection,
        lease: UnitLease,
        verdicts: Sequence[SampleVerdict],
        objects: Sequence[ShardObject],
        *,
        bytes_stored: int,
        at: float,
        event: CommitEvent | None = None,
    ) -> JobCounts:
        """Every pending sample of the unit needs a verdict; one that had ended before keeps its end unless it has one.

        A lease that has expired still counts while nobody else has taken the unit.

        Raises:
            LeaseLost: the unit is not leased to this owner under this fence.
            LedgerError: a verdict for a sample of another unit, none for a pending one, or one that says nothing.
        """
        unit = lease.unit
        held = held_unit(connection, lease)
        if held is None:
            raise LeaseLost(f"unit {unit.index} of job {unit.job!r} is not leased to {lease.owner!r} under fence {lease.fence}")
        named = {"job_number": held.job, "index": held.unit}
        rows = connection.execute(_PLACED, named)
        changes = _judge(unit.index, {row.sample: (SampleStatus(row.status), row.length) for row in rows}, verdicts)
        changes["bytes_stored"] += bytes_stored
        changes["units_committed"] += 1
        _record_verdicts(connection, held.job, verdicts)
        rows_of_objects = ((held.job, o.key, held.unit, o.nbytes) for o in objects)
        insert_rows(connection, shard_objects, rows_of_objects)
        connection.execute(_COMMIT, {**named, "at": at})
        if event is not None:
            connection.execute(_SAY, {"job": unit.job, "name": event.name, "at": at, "data": dict(event.data)})
        return add_counts(connection, held.job, changes)


def _judge(unit: int, placed: _Placed, verdicts: Sequence[SampleVerdict]) -> Counter[str]:
    """Check the verdicts against the unit's samples and say how the job's counters change."""
    changes: Counter[str] = Counter()
    open_samples = {sample for sample, (status, _) in placed.items() if status is SampleStatus.PENDING}
    judged: set[int] = set()
    for verdict in verdicts:
        _require_sense(unit, verdict, placed, judged)
        judged.add(verdict.sample)
        before, length = placed[verdict.sample]
        changes[counter_of(before)] -= 1
        changes[counter_of(verdict.status)] += 1
        changes["tokens_stored"] += length * ((verdict.status is SampleStatus.STORED) - (before is SampleStatus.STORED))
        if before is SampleStatus.SKIPPED:
            changes["tokens_total"] += length
    if missing := sorted(open_samples - judged):
        raise LedgerError(
            f"unit {unit} cannot be committed: {len(missing)} pending samples have no verdict, the first is {missing[0]}"
        )
    return changes


def _require_sense(unit: int, verdict: SampleVerdict, placed: _Placed, judged: set[int]) -> None:
    if verdict.sample not in placed:
        raise LedgerError(f"there is a verdict for sample {verdict.sample}, which is not in unit {unit}")
    if verdict.sample in judged:
        raise LedgerError(f"there are two verdicts for sample {verdict.sample} of unit {unit}")
    if verdict.status not in (SampleStatus.STORED, SampleStatus.FAILED):
        raise LedgerError(f"sample {verdict.sample} of unit {unit} can end as stored or failed, not {counter_of(verdict.status)}")
    if verdict.status is SampleStatus.FAILED and not verdict.reason:
        raise LedgerError(f"sample {verdict.sample} of unit {unit} failed without a reason")


def _record_verdicts(connection: Connection, job_number: int, verdicts: Sequence[SampleVerdict]) -> None:
    if not verdicts:
        return
    connection.execute(
        _JUDGE,
        [
            {
                "job_number": job_number,
                "judged": verdict.sample,
                "status": verdict.status,
                "reason": verdict.reason,
                "attempts": verdict.attempts,
                "worker": verdict.worker,
                "next_token": verdict.next_token,
                "digest": verdict.digest,
            }
            for verdict in verdicts
        ],
    )
