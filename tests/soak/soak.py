"""One life of a service under a steady trickle of faults: job after job, and an eye on what it holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from random import Random
from typing import Any

import httpx
from statetap.commands.children import Child
from statetap.core.capture import reason_kind
from statetap_client.schemas import Job, JobRequest, PlacementChoice
from statetap_client.sync import SyncStatetapClient

from tests.chaos.checks import Reference, harmed_foreigners, leftovers, until_nothing
from tests.chaos.disturbances import DISTURBANCES
from tests.chaos.processes import ChaosCluster, Idle, chaos_cluster
from tests.fakes.cluster import small_model, token_samples
from tests.soak.faults import SteadyFaults
from tests.soak.readings import Held, Reading
from tests.soak.verdict import Soaked

PLACEMENT = PlacementChoice(rows_per_shard=1024, rows_per_chunk=64)
# What waits for a dump that does not come waits as long; nothing else does.
CAPTURE_TIMEOUT_SECONDS = 2.0
LOOKS = 8
SETTLE_SECONDS = 15.0
LOOK_TIMEOUT_SECONDS = 60.0
# Of everything, for each sample: far beyond what one takes.
PATIENCE_SECONDS, PATIENCE_A_SAMPLE = 120.0, 0.3
UNFORESEEN = ("unit.crashed", "dispatch.failed", "projection.failed")


@dataclass(frozen=True)
class Plan:
    """How much of what. Jobs draw their samples from so many distinct ones, which an undisturbed job stores first."""

    samples: int = 20_000
    distinct: int = 2_000
    jobs: int = 20
    side_by_side: int = 2
    workers: int = 8
    faults: float = 0.01
    kills: int = 4
    seed: int = 0
    look_seconds: float = 1.0
    attempts: int = 4

    def datasets(self) -> Iterator[list[dict[str, Any]]]:
        """Each job's samples, all of them distinct."""
        random, pool = Random(f"soak {self.seed}"), self.pool()
        for number in range(self.jobs):
            share = self.samples // self.jobs + (number < self.samples % self.jobs)
            yield random.sample(pool, share)

    def pool(self) -> list[dict[str, Any]]:
        return token_samples(self.distinct, shortest=4, longest=24, seed=self.seed)

    def kills_at(self) -> list[int]:
        """Before which requests a worker is killed, the last one first."""
        random = Random(f"kills {self.seed}")
        return sorted((random.randrange(self.samples) for _ in range(self.kills)), reverse=True)


@contextmanager
def soaking(plan: Plan, folder: Path) -> Iterator[Soak]:
    """Workers and a service, and what an undisturbed job stored of every distinct sample."""
    model = small_model(folder / "llama")
    place = folder / "cluster"
    place.mkdir()
    runtime = {"capture_timeout_seconds": CAPTURE_TIMEOUT_SECONDS, "attempts_per_sample": plan.attempts}
    with chaos_cluster(place, model, small_disks=False, **runtime) as cluster:
        # As a service that runs for long is: it logs no more, and what it holds is all its own.
        cluster.log_level = "info"
        cluster.service_process = Child
        for number in range(plan.workers):
            cluster.start_worker(f"worker-{number}")
        with cluster.start_service() as client:
            cluster.wait_for_workers(client, *cluster.workers)
            job = cluster.run_job(client, plan.pool(), "undisturbed.zarr", **PLACEMENT.model_dump(exclude_unset=True))
            assert (job.state, job.progress.samples.stored) == ("completed", plan.distinct), job
            yield Soak(plan, cluster, client, Reference(job.store))


class Soak:
    """Runs a plan once."""

    def __init__(self, plan: Plan, cluster: ChaosCluster, client: SyncStatetapClient, reference: Reference) -> None:
        self.plan = plan
        self.cluster = cluster
        self.client = client
        self.reference = reference
        self.readings: list[Reading] = []
        self._faults = SteadyFaults(plan.seed, plan.faults)
        self._kills = plan.kills_at()
        self._random = Random(f"victims {plan.seed}")
        self._began = time.monotonic()

    def run(self, on_reading: Callable[[Reading], None] = lambda _: None) -> Soaked:
        """Do all jobs, and judge; `on_reading` is told each look at the service."""
        usual = reduce(or_, (self.cluster.idle() for _ in range(LOOKS)))
        # The second tokenising process starts with the first two datasets that come at once, and holds a pipe from then on.
        usual.descriptors["a pipe"] += 2
        self.cluster.proxies.follow(self._faults)
        datasets = list(self.plan.datasets())
        self._began = time.monotonic()
        with ThreadPoolExecutor(self.plan.side_by_side) as pool:
            running = [pool.submit(self._do, number, samples) for number, samples in enumerate(datasets)]
            try:
                self._watch(running, on_reading)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            seconds = time.monotonic() - self._began
            jobs = [future.result() for future in running]
        return self._judge(jobs, datasets, usual, seconds)

    # --- while it runs ------------------------------------------------------------------------------------------------------

    def _do(self, number: int, samples: list[dict[str, Any]]) -> Job:
        """Submit a job and follow its events to its end, as somebody who watches it does."""
        with self.cluster.client() as client:
            dataset = client.create_dataset(samples, name=f"samples {number}")
            job = client.submit(JobRequest(dataset=dataset.id, store=f"soak-{number}.zarr", placement=PLACEMENT))
            for _ in client.events(job.id):
                pass
            return client.job(job.id)

    def _watch(self, running: list[Future[Job]], on_reading: Callable[[Reading], None]) -> None:
        deadline = self._began + PATIENCE_SECONDS + PATIENCE_A_SAMPLE * self.plan.samples
        while not all(future.done() for future in running):
            self.readings.append(self._look())
            on_reading(self.readings[-1])
            if self._kills and self._faults.requests >= self._kills[-1]:
                self._kills.pop()
                DISTURBANCES["worker killed"].act(self.cluster, self._random)
            if time.monotonic() > deadline:
                # Those who follow its jobs would wait for ever.
                self.cluster.kill_service()
                raise AssertionError(
                    f"not over in {time.monotonic() - self._began:.0f} s, after {self._faults.requests} requests"
                )
            time.sleep(self.plan.look_seconds)

    def _look(self) -> Reading:
        """Look at the service as its users do, then from outside."""
        for _ in self.client.jobs():
            pass
        httpx.get(f"{self.cluster.url}/metrics", timeout=LOOK_TIMEOUT_SECONDS, trust_env=False).raise_for_status()
        assert self.cluster.service is not None
        tasks = self.cluster.idle().tasks.total()
        held = Held.of(self.cluster.service.pid)
        return Reading(
            seconds=round(time.monotonic() - self._began, 2),
            requests=self._faults.requests,
            memory=held.memory,
            shared=held.shared,
            descriptors=held.descriptors,
            threads=held.threads,
            tasks=tasks,
            dumps=_bytes_below(self.cluster.room),
            workers=sum(Held.of(worker.pid).memory for worker in self.cluster.workers.values()),
        )

    # --- afterwards -----------------------------------------------------------------------------------------------------------

    def _judge(self, jobs: list[Job], datasets: list[list[dict[str, Any]]], usual: Idle, seconds: float) -> Soaked:
        cluster = self.cluster
        wrong: list[str] = []
        unexplained = [f"job {job.id} is {job.state}: {job.reason}" for job in jobs if job.state != "completed"]
        failed: Counter[str] = Counter()
        for job, samples in zip(jobs, datasets, strict=True):
            wrong += [f"job {job.id}: {problem}" for problem in self.reference.compare(job.store, samples)]
            for sample in self.client.samples(job.id):
                if sample.status != "stored":
                    failed[reason_kind(sample.reason or "") or "no reason"] += 1
                    unexplained += [] if sample.reason else [f"sample {sample.index} of job {job.id} is {sample.status}"]
        self.client.close()
        left = until_nothing(lambda: [path for job in jobs for path in leftovers(cluster, job.id, job.store)], SETTLE_SECONDS)
        still_held = until_nothing(lambda: cluster.idle().beyond(usual), SETTLE_SECONDS)
        return Soaked(
            samples=self.plan.samples,
            stored=sum(job.progress.samples.stored for job in jobs),
            failed=failed,
            unexplained=tuple(unexplained),
            wrong=tuple(wrong),
            left=tuple(sorted({*left, *harmed_foreigners(cluster)})),
            still_held=tuple(still_held),
            errors=sum(len(cluster.log(event)) for event in UNFORESEEN),
            readings=self.readings,
            requests=self._faults.requests,
            faults=self._faults.by_kind,
            kills=self.plan.kills - len(self._kills),
            seconds=seconds,
        )


def _bytes_below(folder: Path) -> int:
    """What its files take, as far as they stay for the look."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.lstat().st_size
    return found
