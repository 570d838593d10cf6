"""A real service over stand-in workers, and what its process costs: the ground that the rows of the orchestrator stand on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
from statetap.adapters.datasets.arrow_file import COLUMNS, DatasetFile
from statetap.adapters.ledger import SqlLedger
from statetap.commands.children import Child
from statetap.core.records import DatasetRecord
from statetap_client.schemas import Job, JobRequest, PlacementChoice
from statetap_client.sync import SyncStatetapClient

from tests.bench import facts

DATASET = f"ds_{0:032x}"
START_SECONDS = 120.0
SAMPLES_PER_BATCH = 50_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What the stand-ins are: see `stand_ins`."""

    workers: int
    delay: float
    plain: bool = False
    lag: float = 0.0
    hidden: int = 64
    longest: int = 256
    budget_bytes: int = 1 << 30
    module: str = "tests.bench.stand_ins"


@dataclass(slots=True)
class Served:
    """The processes of one run, below `folder`. `ports` are the stand-ins'."""

    folder: Path
    dumps: Path
    shape: Shape
    ports: Sequence[int]
    service: Child | None = None
    url: str = ""

    def start_service(
        self, *, module: str = "statetap", arguments: Sequence[str] = ("serve",), timeout_seconds: float = 60.0
    ) -> SyncStatetapClient:
        """Start the service as its users do, or as another module does it; returns a client once it listens."""
        config = self.folder / "statetap.toml"
        config.write_text(self._settings(), encoding="utf-8")
        self.service = Child("service", module, [*arguments, "--config", str(config)], self.folder / "service.log")
        started = self.service.wait_for("service.started", START_SECONDS)
        self.url = f"http://127.0.0.1:{started['port']}"
        return SyncStatetapClient(self.url, timeout_seconds=timeout_seconds)

    def stop_service(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None

    def kill_service(self) -> None:
        assert self.service is not None
        os.kill(self.service.pid, signal.SIGKILL)
        self.stop_service()

    def wait_for_workers(self, client: SyncStatetapClient) -> None:
        wait_until("all workers ready", lambda: all(worker.state == "ready" for worker in client.workers()))

    def submit(self, client: SyncStatetapClient, store: str, **placement: Any) -> Job:
        return client.submit(JobRequest(dataset=DATASET, store=store, placement=PlacementChoice(**placement)))

    def moments(self) -> dict[str, dict[str, list[int]]]:
        """What the stand-ins saw: see `stand_ins.Moments`."""
        with urlopen(f"http://127.0.0.1:{self.ports[0]}/moments") as answer:
            return dict(json.load(answer))

    @property
    def pid(self) -> int:
        assert self.service is not None
        return self.service.pid

    def _settings(self) -> str:
        lines = [f"data_dir = {json.dumps(str(self.folder / 'data'))}", "[server]", "port = 0", "[log]", 'format = "json"']
        for name, port in zip(facts.worker_names(self.shape.workers), self.ports, strict=True):
            lines += ["[[workers]]", f'name = "{name}"', f'url = "http://127.0.0.1:{port}"', "[workers.dumps]"]
            dumps = self._plain(name) if self.shape.plain else {"kind": "plugin", "dir": str(self.dumps)}
            lines += [f"{key} = {json.dumps(value)}" for key, value in dumps.items()]
        return "\n".join(lines) + "\n"

    def _plain(self, name: str) -> dict[str, Any]:
        return {
            "kind": "plain",
            "dir": str(self.dumps / facts.PLAIN_DIR / name),
            "aux_layer_ids": list(facts.LAYERS),
            "final": facts.FINAL,
            "model_path": facts.MODEL,
            "model_fingerprint": facts.FINGERPRINT,
            "num_layers": facts.NUM_LAYERS,
            "hidden_size": self.shape.hidden,
            "vocab_size": facts.VOCAB_SIZE,
            "dtype": "bfloat16",
            "context_length": facts.CONTEXT_LENGTH,
            "budget_bytes": self.shape.budget_bytes,
            "quiet_period_seconds": 0,
        }


@contextmanager
def served(disk: Path, shape: Shape, shared: Path = Path("/dev/shm")) -> Iterator[Served]:
    """Stand-ins that are up, and a service not started yet; all of it is ended and removed afterwards.

    Dumps are below `shared`, everything else is below `disk`.
    """
    dumps = Path(tempfile.mkdtemp(prefix="statetap-bench-", dir=shared))
    folder = Path(tempfile.mkdtemp(prefix="served-", dir=disk)).absolute()
    options = ["--root", str(dumps), "--workers", str(shape.workers), "--delay", str(shape.delay), "--lag", str(shape.lag)]
    options += ["--hidden", str(shape.hidden), "--longest", str(shape.longest), "--budget-bytes", str(shape.budget_bytes)]
    options += ["--plain"] if shape.plain else []
    with (folder / "stand-ins.log").open("wb") as log:
        stand_ins = subprocess.Popen([sys.executable, "-m", shape.module, *options], stdout=subprocess.PIPE, stderr=log)
    made = Served(folder, dumps, shape, ())
    try:
        assert stand_ins.stdout is not None
        ready = stand_ins.stdout.readline()
        if not ready:
            raise RuntimeError(f"the stand-ins did not start:\n{(folder / 'stand-ins.log').read_text()}")
        made.ports = json.loads(ready)["ports"]
        yield made
    finally:
        made.stop_service()
        stand_ins.terminate()
        stand_ins.wait()
        shutil.rmtree(dumps)
        shutil.rmtree(folder)


def make_dataset(data_dir: Path, lengths: Sequence[int]) -> None:
    """A dataset of random tokens, put where the service keeps its own, as the intake leaves it."""
    folder = data_dir / "datasets"
    folder.mkdir(parents=True)
    file = DatasetFile(folder / f"{DATASET}.arrow", {"model": facts.MODEL})
    random = np.random.default_rng(0)
    for first in range(0, len(lengths), SAMPLES_PER_BATCH):
        offsets = np.cumsum([0, *lengths[first : first + SAMPLES_PER_BATCH]])
        tokens = pa.array(random.integers(0, facts.VOCAB_SIZE, offsets[-1], dtype=np.int32))
        mask = pa.array(np.ones(offsets[-1], np.uint8))
        ids = pa.array([f"s{first + number}" for number in range(len(offsets) - 1)])
        columns = [ids, pa.LargeListArray.from_arrays(offsets, tokens), pa.LargeListArray.from_arrays(offsets, mask)]
        file.append(pa.RecordBatch.from_arrays(columns, schema=COLUMNS).serialize().to_pybytes())
    file.finish("0" * 64)
    record = DatasetRecord(
        id=DATASET,
        name="bench",
        model=facts.MODEL,
        samples=len(lengths),
        tokens=int(sum(lengths)),
        max_tokens=max(lengths),
        sha256="0" * 64,
        tokenizer=facts.MODEL,
        chat_template_sha256="0" * 64,
        created_at=time.time(),
    )
    asyncio.run(_record_dataset(data_dir, record))


async def _record_dataset(data_dir: Path, record: DatasetRecord) -> None:
    ledger = SqlLedger(f"sqlite:///{data_dir / 'ledger.db'}")
    await ledger.open()
    await ledger.add_dataset(record)
    await ledger.close()


def wait_until(what: str, condition: Any, seconds: float = 600.0, pause: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"within {seconds:g} s: not {what}")
        time.sleep(pause)
