"""Seeded schedules of faults on real processes: a service, two workers, proxies and relays between them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import or_
from random import Random
from typing import Any

from statetap.core.capture import reason_kind
from statetap_client.errors import ClientFailure
from statetap_client.schemas import Job, JobRequest, PlacementChoice

from tests.chaos.checks import AtDeath, Reference, at_death, harmed_foreigners, leftovers, unfinished_units, until_nothing
from tests.chaos.disturbances import DISTURBANCES, Disturbance
from tests.chaos.killable import STEPS
from tests.chaos.outcome import Outcome
from tests.chaos.processes import ChaosCluster, Idle
from tests.chaos.proxy import FAULTS, Schedule
from tests.fakes.cluster import token_samples, until

WORKERS = ("left", "right")
POOL = token_samples(160, longest=90, seed=11)
# The datasets, as (first, samples) of the pool. They are submitted once: a process that takes one in starts others, which costs.
SLICES = ((20, 24), (0, 30), (50, 36), (80, 20), (100, 40), (130, 28), (64, 32), (8, 22))
ATTEMPTS = 4
LONGEST_SECONDS = 90.0
POLL_SECONDS = 0.05
# What an idle service holds differs a little from moment to moment.
LOOKS = 8
OVER = ("completed", "failed", "cancelled")
_ONCE_A_UNIT = ("lease", "commit", "forget the answers")
DOOMS = ("error 400", "NaN", "wrong token ids")


@dataclass(frozen=True)
class Death:
    """Where the service is to kill itself."""

    step: str
    when: str
    call: int

    @property
    def name(self) -> str:
        return f"killed {self.when} step: {self.step}"


@dataclass
class Draw:
    """What a schedule does to a job over one of the datasets."""

    seed: int
    dataset: int
    placement: dict[str, Any]
    faults: dict[int, str] = field(default_factory=dict)
    doomed: dict[int, str] = field(default_factory=dict)
    disturbance: str | None = None
    death: Death | None = None

    @property
    def samples(self) -> list[dict[str, Any]]:
        first, count = SLICES[self.dataset]
        return POOL[first : first + count]


def draw(seed: int, *, may_mount: bool, costly: bool) -> Draw:
    """One to three faults: in requests and dumps, and one of the whole."""
    random = Random(f"processes {seed}")
    dataset = random.randrange(len(SLICES))
    placement: dict[str, Any] = {"rows_per_shard": random.choice((128, 256, 512))}
    if random.random() < 0.3:
        placement |= {"order": "permutation", "seed": seed}
    drawn = Draw(seed, dataset, placement)
    count = len(drawn.samples)
    kind = random.random()
    if kind < 0.45:
        possible = [name for name, each in DISTURBANCES.items() if (may_mount or not each.mounts) and (costly or not each.costly)]
        drawn.disturbance = random.choice(possible)
    elif kind < 0.65:
        drawn.death = Death(random.choice(list(STEPS)), random.choice(("before", "after")), random.choice((1, 1, 2, 3, 5)))
    for _ in range(random.randint(0 if kind < 0.65 else 1, 2 if kind < 0.65 else 3)):
        drawn.faults[random.randrange(count)] = random.choice(sorted(FAULTS.keys() - {"error 400"}))
    if random.random() < 0.12:
        drawn.doomed[random.randrange(count)] = random.choice(DOOMS)
    return drawn


def deaths() -> Iterator[Draw]:
    """One schedule for a kill before, and one after, each persisted step, in the middle of a unit where there is one."""
    for number, (step, when) in enumerate(product(STEPS, ("before", "after"))):
        call = 4 if step in ("record an answer", "release a dump") else 2 if step in _ONCE_A_UNIT else 1
        yield Draw(number, number % len(SLICES), {"rows_per_shard": 512}, death=Death(step, when, call))


class ProcessSchedules:
    """Runs schedules on one cluster, one after the other; `usual` is what its service holds while it is idle."""

    def __init__(self, cluster: ChaosCluster, datasets: list[str], reference: Reference, usual: Idle) -> None:
        self.cluster = cluster
        self.datasets = datasets
        self.reference = reference
        self.usual = usual

    @classmethod
    def begin(cls, cluster: ChaosCluster) -> ProcessSchedules:
        """Start the workers and the service, and store the whole pool undisturbed."""
        for name in WORKERS:
            cluster.start_worker(name)
        with cluster.start_service() as client:
            cluster.wait_for_workers(client, *WORKERS)
            job = cluster.run_job(client, POOL, "reference.zarr", rows_per_shard=1024)
            assert (job.state, job.progress.samples.stored) == ("completed", len(POOL)), job
            reference = Reference(job.store)
            slices = [POOL[first : first + count] for first, count in SLICES]
            datasets = [client.create_dataset(samples, name="samples").id for samples in slices]
        looks = [cluster.idle() for _ in range(LOOKS)]
        return cls(cluster, datasets, reference, reduce(or_, looks))

    def run(self, drawn: Draw) -> Outcome:
        return _Run(self, drawn).run()


class _Run:
    def __init__(self, schedules: ProcessSchedules, drawn: Draw) -> None:
        self.cluster = schedules.cluster
        self.dataset = schedules.datasets[drawn.dataset]
        self.reference = schedules.reference
        self.usual = schedules.usual
        self.drawn = drawn
        self.random = Random(f"disturbing {drawn.seed}")
        self.schedule = Schedule(drawn.faults, drawn.doomed)
        self.key = f"schedule-{drawn.seed}-{time.monotonic_ns()}"
        self.job: str | None = None
        self.deaths: list[AtDeath] = []
        self.client = self.cluster.client()
        self.errors_before = self._errors()

    def run(self) -> Outcome:
        began = time.monotonic()
        cluster, drawn = self.cluster, self.drawn
        cluster.proxies.follow(self.schedule)
        cluster.wait_for_workers(self.client, *WORKERS)
        chosen = PlacementChoice(rows_per_chunk=64, **drawn.placement)
        request = JobRequest(dataset=self.dataset, store=f"{self.key}.zarr", placement=chosen)
        if drawn.death is not None:
            cluster.die_at(drawn.death.step, drawn.death.when, drawn.death.call)
        self._persist(lambda: self._submit(request))
        if drawn.disturbance is not None:
            self._disturb(DISTURBANCES[drawn.disturbance])
        problems: list[str] = []
        try:
            until("the job is over", self._is_over, seconds=LONGEST_SECONDS)
            ended = self._persist(lambda: self.client.job(self.job or ""))
            problems = self._judge(ended)
        except AssertionError as error:
            ended = self._persist(lambda: self.client.job(self.job or ""))
            problems = [f"{error}: it is {ended.state} ({ended.reason}), workers {self.client.workers()}"]
        finally:
            self._tidy_up()
        if not problems:
            # The disk of the stores is small, and the next schedule needs its room.
            shutil.rmtree(ended.store)
        return Outcome(
            level="processes",
            seed=drawn.seed,
            faults=tuple(self._faults()),
            samples=len(drawn.samples),
            stored=ended.progress.samples.stored,
            failed=ended.failures,
            asked_again=self.schedule.asked.total() - len(self.schedule.asked),
            seconds=time.monotonic() - began,
            problems=tuple(problems),
        )

    # --- while it runs ----------------------------------------------------------------------------------------------------

    def _submit(self, request: JobRequest) -> Job:
        job = self.client.submit(request, idempotency_key=self.key)
        self.job = job.id
        return job

    def _persist(self, call: Callable[[], Job]) -> Job:
        """Call until the service answers; if it is dead, start it again."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            try:
                return call()
            except ClientFailure:
                if time.monotonic() > deadline:
                    raise
                if self.cluster.service_died:
                    self._revive()
            time.sleep(POLL_SECONDS)

    def _revive(self) -> None:
        self.deaths.append(at_death(self.cluster, self.job, self.schedule.asked))
        self.client.close()
        self.client = self.cluster.revive_service()
        self.errors_before = self._errors()

    def _disturb(self, disturbance: Disturbance) -> None:
        time.sleep(self.random.uniform(0.0, 0.5))
        self.schedule.disturb(disturbance.reasons)
        try:
            disturbance.act(self.cluster, self.random)
        finally:
            self.schedule.disturb(frozenset())

    def _is_over(self) -> bool:
        job = self._persist(lambda: self.client.job(self.job or ""))
        if job.state == "paused" and self._expects_errors and not (job.reason or "").startswith("disk: "):
            self._persist(lambda: self.client.steer(job.id, "resume"))
        return job.state in OVER

    @property
    def _expects_errors(self) -> bool:
        return self.drawn.disturbance is not None and DISTURBANCES[self.drawn.disturbance].unforeseen

    def _errors(self) -> int:
        return sum(len(self.cluster.log(event)) for event in ("unit.crashed", "dispatch.failed", "projection.failed"))

    # --- afterwards ---------------------------------------------------------------------------------------------------------

    def _judge(self, ended: Job) -> list[str]:
        cluster, drawn = self.cluster, self.drawn
        problems = [] if ended.state == "completed" else [f"the job is {ended.state}: {ended.reason}"]
        for sample in self.client.samples(ended.id):
            problems += self._unexplained(sample.index, sample.status, sample.reason)
        problems += self.reference.compare(ended.store, drawn.samples)
        units = [event.data["unit"] for event in self.client.events(ended.id, follow=False) if event.event == "unit.committed"]
        if sorted(units) != list(range(ended.progress.units_total)):
            problems.append(f"units {sorted(units)} were committed, of {ended.progress.units_total}")
        problems += unfinished_units(cluster, ended.id)
        for death in self.deaths:
            again = [sample for sample in death.asked_again(self.schedule.asked) if sample not in self.schedule.hits]
            problems += [f"sample {sample} was asked for again, though its dumps or its commit were there" for sample in again]
        if not self._expects_errors and (more := self._errors() - self.errors_before):
            problems.append(f"{more} errors that nobody foresaw; see {cluster.service and cluster.service.log_file}")
        problems += harmed_foreigners(cluster)
        self.client.close()
        problems += until_nothing(lambda: leftovers(cluster, ended.id, ended.store))
        problems += until_nothing(lambda: cluster.idle().beyond(self.usual))
        return problems

    def _unexplained(self, sample: int, status: str, reason: str | None) -> list[str]:
        hits = self.schedule.hits.get(sample, [])
        doomed = sample in self.drawn.doomed
        if status == "stored":
            return [f"sample {sample} is stored, although no worker could capture it"] if doomed else []
        known = {str(kind) for hit in hits for kind in hit}
        if status == "failed" and reason_kind(reason or "") in known and (doomed or len(hits) >= ATTEMPTS):
            return []
        return [f"sample {sample} ended as {status} ({reason}), which {sorted(known) or 'nothing'} does not explain"]

    def _faults(self) -> list[str]:
        drawn = self.drawn
        whole = [drawn.disturbance] if drawn.disturbance else []
        if drawn.death is not None:
            whole = [drawn.death.name if self.deaths else f"not {drawn.death.name} (never came there)"]
        return [*whole, *self.schedule.took_effect]

    def _tidy_up(self) -> None:
        """Take away what is foreign, and what the dumps' faults left behind for as long as their tap lives."""
        self.cluster.plan_file.unlink(missing_ok=True)
        for proxy in self.cluster.proxies.proxies.values():
            proxy.relay.clear()
        self.client.close()
        self.cluster.proxies.follow(Schedule())
