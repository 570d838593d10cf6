"""One job at full count through a real service: planner, ledger, dispatcher, dumps in shared memory, shards on the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from statetap.adapters.datasets.arrow_file import ArrowDataset
from statetap.core.spec import HiddenArray
from statetap_client import layout
from statetap_client.schemas import Job, JobRequest
from statetap_client.sync import SyncStatetapClient

from tests.bench import facts
from tests.bench.measures import cpu_seconds
from tests.bench.served import DATASET, Served, Shape, make_dataset, served
from tests.bench.stand_ins import beacon_of
from tests.rehearsal.outlet import Outlet
from tests.rehearsal.verdict import Look, Rehearsed
from tests.rehearsal.workers import PlacedStates
from tests.soak.readings import Held

ITEM_BYTES = layout.ITEM_BYTES["bfloat16"]
STATES = len(facts.LAYERS) + 1
SHORTEST = 16
# Of the logarithm of lengths: a mean of 1.2 medians, one sample in ten longer than 2.2 of them.
SPREAD = 0.6
# A worker may hold so much, and two of the longest samples on top: units of about 256 MiB, the next one leased ahead.
UNITS_BYTES = 1 << 30
SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Plan:
    """How much of what. `hidden` is the width: 7168 is full scale. Of `every` shards two are read back before they are removed.

    `null`: only those are written at all (`null_sink`).
    """

    samples: int = 37_000
    median: int = 2_000
    longest: int = 8_192
    hidden: int = 256
    workers: int = 8
    delay: float = 0.0
    every: int = 100
    null: bool = False
    seed: int = 0
    look_seconds: float = 1.0

    def lengths(self) -> list[int]:
        drawn = np.random.default_rng(self.seed).lognormal(np.log(self.median), SPREAD, self.samples)
        return [int(length) for length in np.clip(drawn, SHORTEST, self.longest)]

    @property
    def row_bytes(self) -> int:
        return STATES * self.hidden * ITEM_BYTES

    @property
    def budget_bytes(self) -> int:
        return UNITS_BYTES + 2 * self.longest * self.row_bytes

    @property
    def arrays(self) -> list[HiddenArray]:
        aux = HiddenArray(layout.AUX_HIDDEN_STATES, (len(facts.LAYERS), self.hidden), "bfloat16")
        return [aux, HiddenArray(layout.LAST_HIDDEN_STATES, (self.hidden,), "bfloat16")]


@contextmanager
def rehearsing(plan: Plan, disk: Path, shared: Path = Path("/dev/shm")) -> Iterator[Rehearsal]:
    """Workers and a service, idle. `disk` is where the store will be: of it, what is committed and not yet removed is in use.

    `shared` is where the workers publish.
    """
    shape = Shape(
        plan.workers,
        plan.delay,
        hidden=plan.hidden,
        longest=plan.longest,
        budget_bytes=plan.budget_bytes,
        module="tests.rehearsal.workers",
    )
    with served(disk, shape, shared) as run:
        make_dataset(run.folder / "data", plan.lengths())
        sink = {"module": "tests.rehearsal.null_sink", "arguments": ("--every", str(plan.every))} if plan.null else {}
        with run.start_service(**sink) as client:
            run.wait_for_workers(client)
            yield Rehearsal(plan, run, client)


class Rehearsal:
    """Runs a plan once."""

    def __init__(self, plan: Plan, run: Served, client: SyncStatetapClient) -> None:
        self._plan = plan
        self._run = run
        self._client = client
        self._states = PlacedStates(beacon_of("w0", plan.hidden, plan.budget_bytes), plan.longest)
        self._dataset = ArrowDataset(run.folder / "data" / "datasets" / f"{DATASET}.arrow")
        self._looks: list[Look] = []
        self._stored = 0
        self._over = threading.Event()
        self._began = time.monotonic()

    def run(self, on_look: Callable[[Look], None] = lambda _: None) -> Rehearsed:
        """Do the job, empty its store behind it, and judge; `on_look` is told each look at the service."""
        used = cpu_seconds(self._run.pid)
        self._began = time.monotonic()
        # Each unit's room is taken back as soon as it is committed.
        job = self._client.submit(JobRequest(dataset=DATASET, store="rehearsal.zarr", ignore_space=True))
        watch = threading.Thread(target=self._watch, args=(on_look,), daemon=True)
        watch.start()
        try:
            outlet = self._follow(job)
        finally:
            self._over.set()
            watch.join()
        seconds = time.monotonic() - self._began
        used = cpu_seconds(self._run.pid) - used
        job = self._client.job(job.id)
        return self._judge(job, outlet, seconds, used)

    def _follow(self, job: Job) -> Outlet:
        """Hear of each commit, as any client does, and make room."""
        outlet: Outlet | None = None
        for event in self._client.events(job.id):
            if event.event == "unit.committed":
                outlet = outlet or self._outlet(job)
                outlet.empty(event.data["unit"])
                self._stored += event.data["stored"]
        if outlet is None:
            raise RuntimeError(f"job {job.id} ended without a commit: {self._client.job(job.id).reason}")
        return outlet

    def _outlet(self, job: Job) -> Outlet:
        plan = self._plan
        return Outlet(Path(job.store), self._dataset, self._states, plan.arrays, plan.every)

    def _watch(self, on_look: Callable[[Look], None]) -> None:
        while not self._over.wait(self._plan.look_seconds):
            held = Held.of(self._run.pid)
            seconds = round(time.monotonic() - self._began, 2)
            look = Look(seconds, self._stored, held.anonymous, held.files, held.shared, held.descriptors, held.threads)
            self._looks.append(look)
            on_look(look)

    def _judge(self, job: Job, outlet: Outlet, seconds: float, used: float) -> Rehearsed:
        plan = self._plan
        first = min(arrived for worker in self._run.moments().values() for arrived in worker["arrived"]) / 1e9
        return Rehearsed(
            samples=plan.samples,
            tokens=int(self._dataset.lengths.sum()),
            row_bytes=plan.row_bytes,
            hidden=plan.hidden,
            workers=plan.workers,
            budget_bytes=plan.budget_bytes,
            null=plan.null,
            state=job.state if job.reason is None else f"{job.state}: {job.reason}",
            stored=job.progress.samples.stored,
            units=len(outlet.placement.units),
            read_back=outlet.read_back,
            wrong_records=outlet.wrong_records(),
            wrong_bytes=tuple(outlet.wrong),
            left=(*outlet.left(), *self._dumps_left()),
            looks=self._looks,
            seconds=seconds,
            planning_seconds=first - self._began,
            service_cpu_seconds=used,
            object_bytes=outlet.bytes_emptied,
        )

    def _dumps_left(self) -> tuple[str, ...]:
        """Dumps that nobody released; free files are none."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := tuple(os.fspath(path) for path in self._run.dumps.rglob("req_*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left
