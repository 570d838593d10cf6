"""The disk of the store fills in mid-job and is freed again: the job waits and goes on, with no operator and no loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from statetap_client.sync import SyncStatetapClient

from tests.fakes.cluster import Cluster, assert_same_store, cluster, small_model, token_samples, until
from tests.fakes.mounts import fill, small_tmpfs

SAMPLES = token_samples(60, longest=120, seed=3)
DISK = 24 << 20
RESERVE = 4 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, SyncStatetapClient, Path]]:
    """A service whose stores lie on a small disk, with one slow worker."""
    model = small_model(tmp_path_factory.mktemp("model") / "llama")
    folder = tmp_path_factory.mktemp("cluster")
    with (
        small_tmpfs(folder / "data" / "stores", DISK) as disk,
        cluster(folder, model, disk_reserve_bytes=RESERVE, disk_probe_seconds=0.2) as made,
    ):
        made.start_worker("w", "--layers", "0,1", "--gap-seconds", "0.02")
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            yield made, client, disk


@pytest.fixture(scope="module")
def undisturbed(running: tuple[Cluster, SyncStatetapClient, Path]) -> str:
    made, client, _ = running
    return made.run_job(client, SAMPLES, "undisturbed.zarr").store


def some_stored(client: SyncStatetapClient, job: str) -> bool:
    return 0 < client.job(job).progress.samples.stored < len(SAMPLES)


def test_a_disk_below_its_reserve_pauses_the_job_until_there_is_room(
    running: tuple[Cluster, SyncStatetapClient, Path], undisturbed: str
) -> None:
    made, client, disk = running
    job = made.submit(client, SAMPLES, "paused.zarr")
    until("some units committed", lambda: some_stored(client, job.id))
    ballast = fill(disk, leave=RESERVE // 2)
    until("the job paused", lambda: client.job(job.id).state == "paused")
    paused = client.job(job.id)
    assert (paused.reason or "").startswith("disk: ")
    ballast.unlink()
    ended = client.wait(job.id, poll_seconds=0.05)
    assert (ended.state, ended.progress.samples.stored) == ("completed", len(SAMPLES))
    assert made.leftover_dumps() == []
    assert_same_store(undisturbed, ended.store)


def test_a_disk_that_is_full_in_mid_shard_loses_nothing(
    running: tuple[Cluster, SyncStatetapClient, Path], undisturbed: str
) -> None:
    made, client, disk = running
    job = made.submit(client, SAMPLES, "full.zarr")
    until("some units committed", lambda: some_stored(client, job.id))
    ballast = fill(disk, leave=0)
    until("a shard met the full disk", lambda: bool(made.log("unit.write_failed")))
    ballast.unlink()
    ended = client.wait(job.id, poll_seconds=0.05)
    assert (ended.state, ended.progress.samples.stored) == ("completed", len(SAMPLES))
    # What was captured waited in shared memory: no worker was asked twice.
    assert {worker: tally["attempts"] for worker, tally in ended.workers.items()} == {"w": len(SAMPLES)}
    assert made.leftover_dumps() == []
    assert_same_store(undisturbed, ended.store)
