"""What befalls whole processes and what they stand on: kills, halts, full disks, floods of events, locks."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from statetap.core.capture import RefusalReason
from statetap_sglang.tap import boot_of

from tests.chaos.processes import RESERVE, ChaosCluster
from tests.fakes.cluster import until
from tests.fakes.mounts import fill

R = RefusalReason
# More than fs.inotify.max_queued_events (16384 as a rule), which is the whole machine's and is left as it is.
EVENTS = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text()) + 1000


@dataclass(frozen=True)
class Disturbance:
    """`act` disturbs, lasts so long, and puts everything right again. `reasons`: what any attempt may fail for meanwhile.

    `unforeseen`: errors that the service logs as such, and jobs that wait for a person, are explained by it.
    """

    act: Callable[[ChaosCluster, Random], None]
    reasons: frozenset[RefusalReason] = frozenset()
    mounts: bool = False
    costly: bool = False
    unforeseen: bool = False


def pause(random: Random, least: float, most: float) -> None:
    """Time that passes for real processes: how long a disturbance lasts."""
    time.sleep(random.uniform(least, most))


def _service(cluster: ChaosCluster) -> int:
    assert cluster.service is not None
    return cluster.service.pid


def _halt(pid: int, random: Random, least: float, most: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        pause(random, least, most)
    finally:
        os.kill(pid, signal.SIGCONT)


def _halt_service(cluster: ChaosCluster, random: Random) -> None:
    _halt(_service(cluster), random, 0.2, 4.0)


def _halt_worker(cluster: ChaosCluster, random: Random) -> None:
    _halt(random.choice(list(cluster.workers.values())).pid, random, 0.2, 5.0)


def _kill_worker(cluster: ChaosCluster, random: Random) -> None:
    worker = random.choice(list(cluster.workers.values()))
    os.kill(worker.pid, signal.SIGKILL)
    worker.child.stop()
    cluster.start_worker(worker.name)


def _full(cluster: ChaosCluster, random: Random, at: Path, leave: int) -> None:
    ballast = fill(at, leave=leave)
    try:
        pause(random, 0.3, 1.5)
    finally:
        ballast.unlink()


def _fill_dumps(cluster: ChaosCluster, random: Random) -> None:
    _full(cluster, random, cluster.room, 0)


def _fill_store(cluster: ChaosCluster, random: Random) -> None:
    _full(cluster, random, cluster.stores, random.choice((0, 0, 4096, 300_000)))


def _fill_reserve(cluster: ChaosCluster, random: Random) -> None:
    _full(cluster, random, cluster.stores, RESERVE // 2)


def _overflow(cluster: ChaosCluster, random: Random) -> None:
    """While the service is halted, more is renamed in its taps than its queue of events holds."""
    taps = [tap for tap in cluster.dumps.glob("*/*") if boot_of(tap.name) and not tap.is_symlink()]
    os.kill(_service(cluster), signal.SIGSTOP)
    try:
        tap = random.choice(taps)
        names = [tap / f".flood-{number}" for number in (0, 1)]
        names[0].touch()
        for number in range(EVENTS):
            names[number % 2].rename(names[1 - number % 2])
        pause(random, 0.1, 0.6)
        names[EVENTS % 2].unlink()
    finally:
        os.kill(_service(cluster), signal.SIGCONT)


def _exhaust_descriptors(cluster: ChaosCluster, random: Random) -> None:
    pid = _service(cluster)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + random.choice((0, 1, 2, 4)), before[1]))
    try:
        pause(random, 0.3, 1.5)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _lock_ledger(cluster: ChaosCluster, random: Random) -> None:
    _locked(cluster, random, 0.3, 2.5)


def _lock_ledger_for_long(cluster: ChaosCluster, random: Random) -> None:
    """For longer than the ledger waits for it."""
    _locked(cluster, random, 10.5, 12.5)


def _locked(cluster: ChaosCluster, random: Random, least: float, most: float) -> None:
    with closing(sqlite3.connect(cluster.folder / "data" / "ledger.db", timeout=30, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        pause(random, least, most)
        database.execute("ROLLBACK")


def _kill_service(cluster: ChaosCluster, random: Random) -> None:
    os.kill(_service(cluster), signal.SIGKILL)
    until("the service is dead", lambda: cluster.service_died)


def _stop_service(cluster: ChaosCluster, random: Random) -> None:
    os.kill(_service(cluster), signal.SIGTERM)
    until("the service has stopped", lambda: cluster.service_died)


LOST = frozenset({R.LOST_BY_PUBLISHER, R.MISSING_ROWS, R.REQUEST_FAILED})
FAILED = frozenset({R.REQUEST_FAILED})

DISTURBANCES: Mapping[str, Disturbance] = {
    "service killed": Disturbance(_kill_service),
    "service stopped": Disturbance(_stop_service),
    "service halted": Disturbance(_halt_service, FAILED | {R.MISSING_ROWS}),
    "worker halted": Disturbance(_halt_worker, FAILED | {R.MISSING_ROWS}),
    "worker killed": Disturbance(_kill_worker, FAILED | {R.MISSING_ROWS}, costly=True),
    "dump directory full": Disturbance(_fill_dumps, LOST, mounts=True),
    "store's disk full": Disturbance(_fill_store, mounts=True, unforeseen=True),
    "store's disk below its reserve": Disturbance(_fill_reserve, mounts=True),
    "events overflow": Disturbance(_overflow, FAILED | {R.MISSING_ROWS}),
    "descriptors exhausted": Disturbance(_exhaust_descriptors, FAILED | {R.MISSING_ROWS}, unforeseen=True),
    "ledger locked": Disturbance(_lock_ledger, unforeseen=True),
    "ledger locked for long": Disturbance(_lock_ledger_for_long, costly=True, unforeseen=True),
}
