"""The main job into an object store: the same store as on a disk, through kills and servers that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from statetap_client.errors import StatetapError
from statetap_client.reader import StoreReader

from tests.fakes.cluster import Cluster, assert_same_store, cluster, token_samples, until
from tests.fakes.object_store import SECRET, Fault, ObjectStore

SAMPLES = token_samples(60, longest=120, seed=3)
SLOW = ("--layers", "0,1", "--gap-seconds", "0.03")
UNIT = {"rows_per_shard": 1024}


@pytest.fixture(scope="module")
def on_disk(calm: Cluster) -> str:
    with calm.client() as client:
        return calm.run_job(client, SAMPLES, "beside-objects.zarr", **UNIT).store


def test_a_job_stores_the_same_at_an_object_store(
    tmp_path: Path, model: Path, on_disk: str, object_place: str, object_store: ObjectStore
) -> None:
    """One unit's PUTs fail for a while: it is written again."""
    fault = Fault("PUT", "aux_hidden_states/c/1/0/0", times=4)
    object_store.gate.faults.append(fault)
    with cluster(tmp_path, model) as made:
        made.object_stores = (object_place,)
        made.start_worker("w", "--layers", "0,1")
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            with pytest.raises(StatetapError, match="is not below an object store"):
                made.submit(client, SAMPLES, f"{object_store.url}/elsewhere.zarr")
            job = made.run_job(client, SAMPLES, f"{object_place}/run.zarr", **UNIT)
            assert (job.state, job.failures, job.progress.samples.stored) == ("completed", {}, len(SAMPLES))
            assert made.leftover_dumps() == []
        assert fault.seen == fault.times
        assert made.log("unit.write_failed")
        assert SECRET not in "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert_same_store(on_disk, job.store)
    reader, local = StoreReader(job.store), StoreReader(on_disk)
    for index, sample in enumerate(SAMPLES):
        assert reader.sample(index, verify=True).input_ids.tolist() == sample["input_ids"]
        assert reader.recorded_digest(index) == local.recorded_digest(index)
    verified = subprocess.run(
        [sys.executable, "-m", "statetap_client", "verify", job.store, "--json"],
        capture_output=True,
        timeout=120,
        check=True,
        env=os.environ,
    )
    assert json.loads(verified.stdout)["digests"]["checked"] == len(SAMPLES)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_killed_service_goes_on_where_it_was(
    tmp_path: Path, model: Path, on_disk: str, object_place: str, compression: str
) -> None:
    with cluster(tmp_path, model) as made:
        made.object_stores = (object_place,)
        made.start_worker("w", *SLOW)
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            job = made.submit(client, SAMPLES, f"{object_place}/killed.zarr", compression=compression, **UNIT)
            until("a unit committed", lambda: client.job(job.id).progress.samples.stored > 0)
            made.kill_service()
        with made.start_service() as client:
            ended = client.wait(job.id, poll_seconds=0.05)
            assert (ended.state, ended.failures, ended.progress.samples.stored) == ("completed", {}, len(SAMPLES))
            assert sum(tally["stored"] for tally in ended.workers.values()) == len(SAMPLES)
        assert made.leftover_dumps() == []
    assert_same_store(on_disk, ended.store)
