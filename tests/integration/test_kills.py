"""`kill -9` in mid-job: of the service, of a worker. Nothing is lost, nothing is stored twice, and who did what is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from statetap_client.sync import SyncStatetapClient

from tests.fakes.cluster import Cluster, assert_same_store, cluster, plain_declaration, token_samples, until

SAMPLES = token_samples(60, longest=120, seed=3)
# Slow enough that there is a middle to kill in.
SLOW = ("--layers", "0,1", "--gap-seconds", "0.03")


# Units of a dozen samples: long enough to be met half done.
UNIT = {"rows_per_shard": 1024}


@pytest.fixture(scope="module")
def undisturbed(calm: Cluster) -> str:
    with calm.client() as client:
        return calm.run_job(client, SAMPLES, "kills.zarr", **UNIT).store


def half_done(made: Cluster, job: str, *, plain: bool) -> bool:
    """Whether two answers of the open unit are on record, and so their dumps in shared memory; by count nothing is recorded."""
    if plain:
        return len(list(made.dumps.rglob("req_*"))) >= 2
    journals = (made.folder / "data" / "answers").glob(f"{job}-*.ndjson")
    return any(journal.read_bytes().count(b"\n") >= 2 for journal in journals)


def stored(client: SyncStatetapClient, job: str) -> int:
    return client.job(job).progress.samples.stored


@pytest.mark.parametrize("plain", [False, True], ids=["plugin", "plain"])
def test_a_killed_service_goes_on_where_it_was(tmp_path: Path, model: Path, undisturbed: str, plain: bool) -> None:
    # One sample a request: the answers of a larger one are on record all at once, and its unit is over a moment later.
    with cluster(tmp_path, model, max_batch_tokens=0) as made:
        declared = plain_declaration(made.dumps, "w", model) if plain else None
        made.start_worker("w", *SLOW, *(("--plain", "safetensors", "--publish-decode") if plain else ()), plain=declared)
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            job = made.submit(client, SAMPLES, "killed.zarr", **UNIT)
            until("a unit committed", lambda: stored(client, job.id) > 0)
            until("the next one half done", lambda: half_done(made, job.id, plain=plain))
            made.kill_service()
        with made.start_service() as client:
            assert 0 < stored(client, job.id) < len(SAMPLES)
            ended = client.wait(job.id, poll_seconds=0.05)
            assert (ended.state, ended.failures, ended.progress.samples.stored) == ("completed", {}, len(SAMPLES))
            assert sum(tally["stored"] for tally in ended.workers.values()) == len(SAMPLES)
            committed = [event.data["unit"] for event in client.events(job.id, follow=False) if event.event == "unit.committed"]
            assert sorted(committed) == list(range(ended.progress.units_total))
            if not plain:
                assert made.log("capture.adopted"), "dumps in shared memory were not used again"
        assert made.leftover_dumps() == []
        assert_same_store(undisturbed, ended.store)


def test_a_stopped_service_leaves_the_rest_to_the_next_start(tmp_path: Path, model: Path, undisturbed: str) -> None:
    with cluster(tmp_path, model) as made:
        made.start_worker("w", *SLOW)
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            job = made.submit(client, SAMPLES, "stopped.zarr", **UNIT)
            until("some units committed", lambda: 0 < stored(client, job.id) < len(SAMPLES) - 10)
        assert made.service is not None
        made.service.stop()
        assert made.log("service.stopped")
        with made.start_service() as client:
            assert client.wait(job.id, poll_seconds=0.05).state == "completed"
        assert_same_store(undisturbed, job.store)


def test_a_killed_worker_is_survived_named_and_used_again(tmp_path: Path, model: Path, undisturbed: str) -> None:
    with cluster(tmp_path, model) as made:
        made.start_worker("lasting", *SLOW)
        mortal = made.start_worker("mortal", *SLOW)
        with made.start_service() as client:
            made.wait_for_workers(client, "lasting", "mortal")
            job = made.submit(client, SAMPLES, "worker.zarr", **UNIT)
            until("both work", lambda: _busy(made, client, job.id) == {"lasting", "mortal"})
            os.kill(mortal.pid, signal.SIGKILL)
            until("the loss seen", lambda: "mortal" not in made.ready_workers(client))
            made.start_worker("mortal", *SLOW, port=mortal.port)
            made.wait_for_workers(client, "mortal")
            again = made.submit(client, SAMPLES, "again.zarr", **UNIT)
            first, second = (client.wait(each.id, poll_seconds=0.05) for each in (job, again))
            for ended in (first, second):
                assert (ended.state, ended.failures, ended.progress.samples.stored) == ("completed", {}, len(SAMPLES))
            assert sum(tally["stored"] for tally in first.workers.values()) == len(SAMPLES)
            assert second.workers["mortal"]["stored"] > 0, "the worker that came back was not used"
            lost = made.log("worker.unreachable")
            assert {line["worker"] for line in lost} == {"mortal"}
            attempts = sum(tally["attempts"] for tally in first.workers.values())
            assert attempts == len(SAMPLES) + sum(tally["lost"] for tally in first.workers.values())
            retried = made.log("sample.retried")
            assert all(line["worker"] == "mortal" and "mortal" in line["reason"] for line in retried)
        assert_same_store(undisturbed, first.store)
        assert_same_store(undisturbed, second.store)


def _busy(made: Cluster, client: SyncStatetapClient, job: str) -> set[str]:
    """The workers that have made at least two attempts for the job."""
    now = client.job(job)
    assert now.state in ("planning", "running")
    return {worker for worker, tally in now.workers.items() if tally["attempts"] >= 2}
