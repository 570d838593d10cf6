"""A service and a worker that recycle: one job after another makes no dump files of its own, and stores the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from statetap_sglang.free_files import RECYCLE_FROM_BYTES
from statetap_sglang.tap import FREE_DIRECTORY

from tests.fakes.cluster import Cluster, assert_same_store, cluster, token_samples

# A row takes 1 KiB: two layers and two final states of 64 float32.
SAMPLES = token_samples(40, longest=300, seed=5, shortest=RECYCLE_FROM_BYTES // 1024 + 1)

# Room for so many dumps at a time, at most; so many files are all that are ever made.
AT_ONCE = 12
BUDGET = AT_ONCE * RECYCLE_FROM_BYTES


def free_files(made: Cluster) -> set[int]:
    """The inodes of the worker's free files: between jobs, of all dump files that were ever made and are still there."""
    found = made.dumps.glob(f"w/*/{FREE_DIRECTORY}/*")
    return {path.stat().st_ino for path in found}


def test_at_steady_state_no_file_is_made_and_kills_leak_nothing(tmp_path: Path, model: Path) -> None:
    with cluster(tmp_path, model) as made:
        worker = made.start_worker("w", "--layers", "0,1", "--budget-bytes", str(BUDGET))
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            first = made.run_job(client, SAMPLES, "first.zarr", rows_per_shard=1024)
            assert first.progress.samples.stored == len(SAMPLES)
            before = free_files(made)
            second = made.run_job(client, SAMPLES, "second.zarr", rows_per_shard=1024)
            # Of twice as many dumps as there are samples. A job may have had a unit more in flight than the one before it.
            assert 0 < len(before | free_files(made)) <= AT_ONCE
            assert_same_store(first.store, second.store)
        kept = free_files(made)
        made.kill_service()
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            third = made.run_job(client, SAMPLES, "third.zarr", rows_per_shard=1024)
            assert kept & free_files(made), "those of before the kill are still used"
            assert_same_store(first.store, third.store)
        made.kill_service()
        os.kill(worker.pid, signal.SIGKILL)
        worker.child.stop()
        made.start_worker("w", "--layers", "0,1", "--budget-bytes", str(BUDGET))
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            assert free_files(made) == set()
            assert len(list((made.dumps / "w").iterdir())) == 1, "the dead worker's tap is gone"
        assert made.leftover_dumps() == []
