"""A plugin that cannot publish: the server keeps serving, and the service gets a reason for each capture that is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from statetap_client.schemas import Sample
from statetap_client.sync import SyncStatetapClient

from tests.e2e.reference import prompts
from tests.e2e.server import SglangServer, running
from tests.e2e.service import service_over
from tests.e2e.shims.planted_faults import START, STEPS
from tests.fakes.cluster import Cluster, until

FLAGS = ("--disable-radix-cache", "--chunked-prefill-size", "-1", "--max-total-tokens", "4096")
TMPFS_BYTES = 32 << 20
PAGE_BYTES = 4096
# More than error records take, less than a dump of 40 rows does.
SOME_PAGES = 8


@pytest.fixture(scope="module")
def root(dumps: Path) -> Iterator[Path]:
    """A dump root on a small tmpfs of its own; where mounting is not permitted, in shared memory like any other."""
    place = dumps / "own"
    place.mkdir(mode=0o700)
    options = f"size={TMPFS_BYTES},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "statetap-e2e", place], check=False).returncode == 0
    yield place
    if mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def tmpfs(root: Path) -> Path:
    """The small tmpfs that nothing else is on."""
    if not root.is_mount():
        pytest.skip("mounting is not permitted here, and a tmpfs that others use must not be filled or made unwritable")
    return root


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


@dataclass(frozen=True, slots=True)
class Afflicted:
    """A server whose plugin can be given trouble, one whose plugin could not start, and the service over both.

    `control` names the step of the first one's plugin that raises.
    """

    server: SglangServer
    refusing: SglangServer
    made: Cluster
    client: SyncStatetapClient
    control: Path

    def samples(self, count: int, length: int = 40) -> list[dict[str, list[int]]]:
        return [{"input_ids": ids} for ids in prompts(self.server.model, [length] * count)]

    def lost_for_want_of_room(self) -> list[dict[str, Any]]:
        """The log's lines about such captures."""
        return [line for line in self.made.log("dump.lost") if "No space left on device" in line["reason"]]

    def run(self, count: int, length: int = 40) -> tuple[int, list[Sample]]:
        """Run a job of so many samples to its end; how many were stored, and the others. The server answers throughout."""
        samples = self.samples(count, length)
        store = f"{len(list(self.client.jobs()))}.zarr"
        job = self.made.run_job(self.client, samples, store)
        assert job.state == "completed"
        answer = self.server.generate(samples[0]["input_ids"], "direct")
        assert answer["meta_info"]["completion_tokens"] == 1
        self.server.check_alive()
        return job.progress.samples.stored, list(self.client.samples(job.id, status="failed"))


@pytest.fixture(scope="module")
def afflicted(folder: Path, root: Path) -> Iterator[Afflicted]:
    controls = {name: folder / f"{name}.fault" for name in ("afflicted", "refusing")}
    controls["refusing"].write_text(START, encoding="utf-8")
    servers = {
        name: SglangServer(
            name=name,
            folder=folder,
            dumps=root,
            flags=FLAGS,
            plugin={"LAYERS": "all", "FINAL": "both", "BUDGET_BYTES": str(TMPFS_BYTES // 2)},
            variables={"E2E_PLANTED_FAULTS": str(control)},
        )
        for name, control in controls.items()
    }
    runtime = {"attempts_per_sample": 1, "capture_timeout_seconds": 2.0}
    with running(*servers.values()), service_over(folder, servers, **runtime) as (made, client):
        made.wait_for_workers(client, "afflicted")
        yield Afflicted(servers["afflicted"], servers["refusing"], made, client, controls["afflicted"])


@pytest.fixture(autouse=True)
def healthy_before_and_after(afflicted: Afflicted) -> Iterator[None]:
    """What was lost is over with the trouble: the next capture is stored."""
    yield
    assert afflicted.run(2) == (2, [])


def test_a_plugin_that_cannot_start_says_why(afflicted: Afflicted) -> None:
    answer = afflicted.refusing.generate([5, 6, 7], "served")
    assert (answer["meta_info"]["completion_tokens"], answer["meta_info"].get("statetap_dumps")) == (1, None)
    (worker,) = [worker for worker in afflicted.client.workers() if worker.name == "refusing"]
    assert worker.state == "refused"
    assert f"planted in {START}" in (worker.reason or "")


@pytest.mark.parametrize("step", STEPS)
def test_an_error_in_any_step_loses_the_capture_alone(afflicted: Afflicted, step: str) -> None:
    afflicted.control.write_text(step, encoding="utf-8")
    try:
        stored, failed = afflicted.run(2)
    finally:
        afflicted.control.unlink()
    assert (stored, len(failed)) == (0, 2)
    for sample in failed:
        assert sample.reason is not None
        assert sample.reason.startswith("lost_by_publisher")
        # `before_batch` only keeps the batch; what is told is that the pass could not begin without it.
        told = "the pass could not begin" if step == "SGLangPlugin.before_batch" else f"planted in {step}"
        assert told in sample.reason


def test_a_tmpfs_without_room_for_a_dump(afflicted: Afflicted, tmpfs: Path) -> None:
    """Want of room is nobody's fault: the job waits for it, is told why, and loses nothing."""
    client, samples = afflicted.client, afflicted.samples(3)
    filling = fill(tmpfs, leave_pages=SOME_PAGES)
    try:
        job = afflicted.made.submit(client, samples, "waits-for-room.zarr")
        until("captures are lost for want of room", lambda: len(afflicted.lost_for_want_of_room()) >= 3)
        waiting = client.job(job.id)
        assert afflicted.server.generate(samples[0]["input_ids"], "meanwhile")["meta_info"]["completion_tokens"] == 1
    finally:
        filling.unlink()
    assert (waiting.state, waiting.progress.samples.pending) == ("running", 3)
    ended = client.wait(job.id, poll_seconds=0.1)
    assert (ended.state, ended.progress.samples.stored) == ("completed", 3)


def test_a_tmpfs_without_room_for_anything(afflicted: Afflicted, tmpfs: Path) -> None:
    """Not even an error record fits: the service says itself what is missing, and is told later how many were lost."""
    told = len(afflicted.lost_for_want_of_room())
    filling = fill(tmpfs, leave_pages=0)
    try:
        stored, failed = afflicted.run(2)
    finally:
        filling.unlink()
    assert (stored, len(failed)) == (0, 2)
    assert all(sample.reason for sample in failed)
    assert afflicted.run(1) == (1, [])
    until("the losses told", lambda: len(afflicted.lost_for_want_of_room()) > told)


def test_a_directory_that_cannot_be_written(afflicted: Afflicted, tmpfs: Path) -> None:
    remount(tmpfs, "ro")
    try:
        stored, failed = afflicted.run(2)
    finally:
        remount(tmpfs, "rw")
    assert (stored, len(failed)) == (0, 2)
    assert all(sample.reason for sample in failed)


def test_a_directory_that_is_removed(afflicted: Afflicted) -> None:
    """The plugin makes it again; what was published in between is lost with a reason, and asked again where that may be."""
    samples = afflicted.samples(100)
    job = afflicted.made.submit(afflicted.client, samples, "removed.zarr")
    until("the job at work", lambda: afflicted.client.job(job.id).progress.samples.stored > 0)
    shutil.rmtree(afflicted.server.tap())
    answer = afflicted.server.generate(samples[0]["input_ids"], "meanwhile")
    assert answer["meta_info"]["completion_tokens"] == 1
    ended = afflicted.client.wait(job.id, poll_seconds=0.1)
    failed = list(afflicted.client.samples(job.id, status="failed"))
    assert ended.progress.samples.stored + len(failed) == len(samples)
    assert all(sample.reason for sample in failed)


def fill(folder: Path, *, leave_pages: int) -> Path:
    """A file that takes all of a tmpfs but some pages."""
    status = os.statvfs(folder)
    filling = folder / "filling"
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (status.f_bavail - leave_pages) * PAGE_BYTES)
    return filling
