"""What was acknowledged survives a killed process; what was not is not there by halves."""

from __future__ import annotations

import asyncio
import signal
import sys

from statetap.adapters.ledger import SqlLedger
from statetap.core.records import JobCounts, SampleStatus, UnitState

from tests.contract.ledgers.plan import AT_START

# Commits unit 0, leases unit 1, says so, and then stands in the middle of a further transaction until it is killed.
WRITER = """
import asyncio, sys
from statetap.adapters.ledger import SqlLedger
from statetap.core.records import ShardObject
from tests.contract.ledgers.plan import SAMPLES, UNITS, dataset, job, stored

async def main():
    ledger = SqlLedger(sys.argv[1])
    await ledger.open()
    await ledger.add_dataset(dataset())
    await ledger.add_job(job(), UNITS, SAMPLES)
    lease = await ledger.lease_unit("job", "first", now=0.0, ttl_seconds=60)
    thing = ShardObject(key="aux/c/0", nbytes=1)
    await ledger.commit_unit(lease, [stored(3), stored(0)], [thing], bytes_stored=5, at=1.0)
    await ledger.lease_unit("job", "first", now=0.0, ttl_seconds=60)
    def unfinished():
        yield from SAMPLES[:4]
        print("acknowledged", flush=True)
        sys.stdin.read()
    await ledger.add_job(job("half"), UNITS, unfinished())

asyncio.run(main())
"""


async def test_a_killed_process_loses_nothing_that_it_was_promised(tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.db"
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, url, **pipes)
    try:
        assert await writer.stdout.readline() == b"acknowledged\n"
    finally:
        writer.kill()
    assert await writer.wait() == -signal.SIGKILL

    ledger = SqlLedger(url)
    await ledger.open()
    assert (await ledger.job("job")).counts == JobCounts(
        pending=2,
        stored=2,
        skipped=1,
        tokens_total=AT_START.tokens_total,
        tokens_stored=23,
        bytes_stored=5,
        units_total=2,
        units_committed=1,
    )
    assert [s.status for s in await ledger.unit_samples("job", 0)] == [SampleStatus.STORED] * 2
    assert [j.id for j in (await ledger.jobs(limit=9, cursor=None)).items] == ["job"]
    assert [u.index for u in await ledger.units("job", UnitState.LEASED)] == [1]
    assert await ledger.take_over("second") == [("job", 1)]
    lease = await ledger.lease_unit("job", "second", now=0.0, ttl_seconds=60)
    assert (lease.unit.index, lease.fence) == (1, 2)
    await ledger.close()
