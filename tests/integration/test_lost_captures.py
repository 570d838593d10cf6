"""The dump directory is full while a job runs: captures are lost for lack of room, and each is told; no sample is."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.cluster import Cluster, assert_same_store, cluster, token_samples, until
from tests.fakes.mounts import fill, small_tmpfs

SAMPLES = token_samples(30, longest=90, seed=11, shortest=60)
ROOM = 8 << 20
# A dump of 60 rows takes 80 KB, the record of its loss one page.
LEFT = 64 << 10


def test_a_full_dump_directory_costs_attempts_and_no_sample(tmp_path: Path, model: Path, calm: Cluster) -> None:
    with calm.client() as client:
        undisturbed = calm.run_job(client, SAMPLES, "lost-captures.zarr").store
    with cluster(tmp_path, model, attempts_per_sample=1) as made, small_tmpfs(made.dumps / "w", ROOM) as directory:
        made.start_worker("w", "--layers", "0,1")
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            ballast = fill(directory, leave=LEFT)
            job = made.submit(client, SAMPLES, "full.zarr")
            until("captures lost", lambda: len(made.log("dump.lost")) >= 3)
            ballast.unlink()
            ended = client.wait(job.id, poll_seconds=0.05)
            assert (ended.state, ended.failures, ended.progress.samples.stored) == ("completed", {}, len(SAMPLES))
            lost = made.log("dump.lost")
            assert all("No space left on device" in line["reason"] and line["pause_seconds"] > 0 for line in lost)
            told = [event.data["lost"] for event in client.events(job.id, follow=False) if event.event == "unit.committed"]
            assert sorted(attempt["rid"] for unit in told for attempt in unit) == sorted(line["rid"] for line in lost)
        assert made.leftover_dumps() == []
        assert_same_store(undisturbed, ended.store)
