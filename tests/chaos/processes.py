"""Real processes to disturb: a service that can be told where to die, embedded workers, a proxy and a relay before each.

Dumps and stores lie on small file systems of their own where mounting is allowed (root), so that they can be filled.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statetap.commands.children import Child
from statetap_client.sync import SyncStatetapClient

from tests.chaos.proxy import ProxyThread
from tests.fakes.cluster import START_SECONDS, Cluster, Worker, until
from tests.fakes.mounts import small_tmpfs
from tests.fakes.nursery import NurseryChild

DUMP_ROOM = 24 << 20
STORE_ROOM = 48 << 20
RESERVE = 8 << 20
WORKER_FLAGS = ("--layers", "0,1", "--gap-seconds", "0.02", "--chunked-prefill-size", "-1")
# Short, so that what runs out runs out soon; longer than anything that an undisturbed worker takes.
RUNTIME: dict[str, Any] = {
    "request_timeout_base_seconds": 8.0,
    "request_timeout_seconds_per_1k_tokens": 0,
    "capture_timeout_seconds": 5.0,
    "lease_seconds": 3.0,
    "rescan_seconds": 1.0,
    "disk_probe_seconds": 0.2,
    "disk_reserve_bytes": RESERVE,
    "drain_seconds": 5.0,
}


@dataclass
class Idle:
    """What the service holds while nothing is to be done: file descriptors by what they are, and tasks by what they run."""

    descriptors: Counter[str] = field(default_factory=Counter)
    mapped_dumps: int = 0
    tasks: Counter[str] = field(default_factory=Counter)

    def __or__(self, other: Idle) -> Idle:
        """The most of each."""
        most = max(self.mapped_dumps, other.mapped_dumps)
        return Idle(self.descriptors | other.descriptors, most, self.tasks | other.tasks)

    def beyond(self, usual: Idle) -> list[str]:
        """What is held that usually is not."""
        more = [f"{count} more descriptors of {what}" for what, count in (self.descriptors - usual.descriptors).items()]
        more += [f"{count} more tasks of {what}" for what, count in (self.tasks - usual.tasks).items()]
        return more + ([f"{self.mapped_dumps} mapped dumps"] if self.mapped_dumps else [])


@dataclass(slots=True)
class ChaosCluster(Cluster):
    """`dumps` is the root that the service watches, `private` the one that workers publish below; `room` has both.

    `service_process` starts the service: from the nursery, or, where its memory matters, as a process that shares none.
    """

    service_process: type[Child] = NurseryChild
    proxies: ProxyThread = field(default_factory=ProxyThread)
    may_mount: bool = False

    @property
    def room(self) -> Path:
        return self.dumps.parent

    @property
    def private(self) -> Path:
        return self.room / "private"

    @property
    def stores(self) -> Path:
        return self.folder / "data" / "stores"

    @property
    def plan_file(self) -> Path:
        return self.folder / "die-at.json"

    def start_worker(self, name: str, *flags: str, port: int = 0, plain: dict[str, Any] | None = None) -> Worker:
        """Start a worker behind its proxy, again if the name was used before."""
        self.starts += 1
        arguments = ["--model", str(self.model), "--dump-dir", str(self.private), "--name", name, "--port", str(port)]
        arguments += ["--dtype", "float32", "--final", "both", "--skip-tokenizer-init", *(flags or WORKER_FLAGS)]
        child = NurseryChild(name, "statetap.embedded", arguments, self.folder / f"{name}-{self.starts}.log")
        ready = child.wait_for("worker.ready", START_SECONDS)
        proxy = self.proxies.put_before(name, int(ready["port"]), self.private, self.dumps)
        worker = self.workers[name] = Worker(name, flags, child, proxy.port, plain)
        return worker

    def start_service(self) -> SyncStatetapClient:
        """Start the service on what is in its folder; returns a client of it."""
        config = self.folder / "statetap.toml"
        config.write_text(self._settings(), encoding="utf-8")
        self.starts += 1
        arguments = [str(self.plan_file), "serve", "--config", str(config)]
        log_file = self.folder / f"service-{self.starts}.log"
        self.service = self.service_process("service", "tests.chaos.killable", arguments, log_file)
        started = self.service.wait_for("service.started", START_SECONDS)
        self.url = f"http://127.0.0.1:{started['port']}"
        return SyncStatetapClient(self.url)

    def stop(self) -> None:
        Cluster.stop(self)
        self.proxies.stop()

    def die_at(self, step: str, when: str, call: int) -> None:
        """Let the service kill itself at the n-th such step from now on."""
        unfinished = self.plan_file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"step": step, "when": when, "call": call, "at": time.monotonic()}))
        unfinished.replace(self.plan_file)

    @property
    def service_died(self) -> bool:
        """Whether the service's process has ended, though nobody has waited for it yet."""
        assert self.service is not None
        return Path(f"/proc/{self.service.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"

    def revive_service(self) -> SyncStatetapClient:
        """Start the service again, after it died or to make it die."""
        self.plan_file.unlink(missing_ok=True)
        self.kill_service()
        return self.start_service()

    # --- what is held -----------------------------------------------------------------------------------------------------

    def idle(self) -> Idle:
        """What the service holds now. Its connections are left out: they close by themselves after a while."""
        assert self.service is not None
        told = self.plan_file.with_suffix(".tasks")
        told.unlink(missing_ok=True)
        os.kill(self.service.pid, signal.SIGUSR1)
        until("the service tells its tasks", told.exists, seconds=20)
        tasks = Counter(name for name in json.loads(told.read_text()) if not name.startswith(("RequestHandler", "Connector")))
        process = Path(f"/proc/{self.service.pid}")
        held: Counter[str] = Counter()
        for descriptor in (process / "fd").iterdir():
            try:
                what = _kind(str(descriptor.readlink()))
            except FileNotFoundError:
                continue
            if what is not None:
                held[what] += 1
        mapped = sum(str(self.dumps) in line for line in (process / "maps").read_text().splitlines())
        return Idle(held, mapped, tasks)

    def sample_memory(self) -> int:
        """The service's resident bytes."""
        assert self.service is not None
        pages = int(Path(f"/proc/{self.service.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()


def _kind(target: str) -> str | None:
    """What a descriptor is of, by the same words in every process; None where their number says nothing."""
    if target.startswith("socket:") or "ledger.db" in target:  # the ledger's pool opens and closes connections as it needs them
        return None
    if target.endswith(".log"):
        return "the log"
    return "a pipe" if target.startswith("pipe:") else target


def mounting_is_allowed(folder: Path) -> bool:
    """Whether a small file system can be mounted here: root's privilege, and not every container's."""
    trial = folder / "trial"
    trial.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", str(trial)], capture_output=True, check=False)
    if mounted.returncode == 0:
        subprocess.run(["umount", str(trial)], check=True)
    trial.rmdir()
    return mounted.returncode == 0


@contextmanager
def chaos_cluster(folder: Path, model: Path, *, small_disks: bool = True, **runtime: Any) -> Iterator[ChaosCluster]:
    """A cluster without processes yet; all that it starts is ended, and what it mounted or made in shared memory removed."""
    room = Path("/dev/shm") / f"statetap-chaos-{os.getpid()}-{time.monotonic_ns()}"
    room.mkdir(mode=0o700)
    made = ChaosCluster(folder, room / "dumps", model, RUNTIME | runtime)
    made.may_mount = small_disks and mounting_is_allowed(folder)
    try:
        with ExitStack() as mounts:
            if made.may_mount:
                mounts.enter_context(small_tmpfs(room, DUMP_ROOM))
                mounts.enter_context(small_tmpfs(made.stores, STORE_ROOM))
            for root in (made.dumps, made.private):
                root.mkdir(mode=0o700)
            try:
                yield made
            finally:
                made.stop()
    finally:
        shutil.rmtree(room)
