"""A service and embedded workers as real processes, on one small model: what the integration tests drive.

Everything lives below one temporary folder and in one dump root in shared memory, and is ended with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
import zarr.storage
from obstore.store import from_url
from statetap.commands.children import Child
from statetap_client.schemas import CompressionName, Job, JobRequest, PlacementChoice
from statetap_client.sync import SyncStatetapClient

from tests.fakes.models import save_model, small_llama
from tests.fakes.nursery import NurseryChild

if TYPE_CHECKING:
    from zarr.storage import StoreLike

START_SECONDS = 120.0
WAIT_SECONDS = 120.0
MODEL_FINGERPRINT = "declared-by-the-test"


def until(what: str, condition: Callable[[], bool], *, seconds: float = WAIT_SECONDS) -> None:
    """Look until it is so: what is waited for happens in another process."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"within {seconds:g} s: not {what}")
        time.sleep(0.02)


@dataclass(slots=True)
class Worker:
    """An embedded worker: its process, its flags, and where it publishes."""

    name: str
    flags: tuple[str, ...]
    child: Child
    port: int
    plain: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        return self.child.pid


@dataclass(slots=True)
class Cluster:
    """One service with its workers. `runtime` are settings of the `[runtime]` table."""

    folder: Path
    dumps: Path
    model: Path
    runtime: dict[str, Any] = field(default_factory=dict)
    object_stores: tuple[str, ...] = ()
    log_level: str = "debug"
    workers: dict[str, Worker] = field(default_factory=dict)
    service: Child | None = None
    url: str = ""
    starts: int = 0

    # --- processes ------------------------------------------------------------------------------------------------------

    def start_worker(self, name: str, *flags: str, port: int = 0, plain: dict[str, Any] | None = None) -> Worker:
        """Start a worker, again if the name was used before; `plain` is what its configuration declares of plain dumps.

        Unless `flags` say otherwise it runs prompts whole: the rows of one that a pass cuts, wherever its neighbours leave off,
        round otherwise, and many tests compare stores bit for bit.
        """
        arguments = ["--model", str(self.model), "--dump-dir", str(self.dumps), "--name", name, "--port", str(port)]
        arguments += ["--dtype", "float32", "--final", "both", "--skip-tokenizer-init", "--chunked-prefill-size", "-1", *flags]
        self.starts += 1
        child = NurseryChild(name, "statetap.embedded", arguments, self.folder / f"{name}-{self.starts}.log")
        ready = child.wait_for("worker.ready", START_SECONDS)
        worker = self.workers[name] = Worker(name, flags, child, int(ready["port"]), plain)
        return worker

    def start_service(self) -> SyncStatetapClient:
        """Start the service on what is in its folder; returns a client of it."""
        config = self.folder / "statetap.toml"
        config.write_text(self._settings(), encoding="utf-8")
        self.starts += 1
        self.service = NurseryChild(
            "service", "statetap", ["serve", "--config", str(config)], self.folder / f"service-{self.starts}.log"
        )
        started = self.service.wait_for("service.started", START_SECONDS)
        self.url = f"http://127.0.0.1:{started['port']}"
        return SyncStatetapClient(self.url)

    def client(self) -> SyncStatetapClient:
        """Another client of the running service."""
        return SyncStatetapClient(self.url)

    def kill_service(self) -> None:
        assert self.service is not None
        os.kill(self.service.pid, signal.SIGKILL)
        self.service.stop()

    def stop(self) -> None:
        for child in [*(worker.child for worker in self.workers.values()), *([self.service] if self.service else [])]:
            child.stop()

    def _settings(self) -> str:
        runtime = {
            "probe_seconds": 0.2,
            "projection_seconds": 0.5,
            "progress_seconds": 0.5,
            "retry_backoff_seconds": 0.1,
            **self.runtime,
        }
        lines = [f"data_dir = {json.dumps(str(self.folder / 'data'))}", f"model = {json.dumps(str(self.model))}"]
        lines += [f"object_stores = {json.dumps(self.object_stores)}"]
        lines += ["[server]", "port = 0", "[log]", f'level = "{self.log_level}"', "[runtime]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in runtime.items()]
        for worker in self.workers.values():
            lines += ["[[workers]]", f'name = "{worker.name}"', f'url = "http://127.0.0.1:{worker.port}"', "[workers.dumps]"]
            dumps = worker.plain or {"kind": "plugin", "dir": str(self.dumps)}
            lines += [f"{key} = {json.dumps(value)}" for key, value in dumps.items()]
        return "\n".join(lines) + "\n"

    # --- what happened ------------------------------------------------------------------------------------------------------

    def log(self, event: str) -> list[dict[str, Any]]:
        """The present service's log lines of one event."""
        assert self.service is not None
        return self.service.lines_of(event)

    def ready_workers(self, client: SyncStatetapClient) -> set[str]:
        return {worker.name for worker in client.workers() if worker.state == "ready"}

    def wait_for_workers(self, client: SyncStatetapClient, *names: str) -> None:
        until(f"{', '.join(names)} ready", lambda: set(names) <= self.ready_workers(client))

    def leftover_dumps(self) -> list[str]:
        """Dump files and directories that are still there, error records included."""
        return sorted(str(path.relative_to(self.dumps)) for path in self.dumps.rglob("req_*"))

    def run_job(self, client: SyncStatetapClient, samples: Sequence[dict[str, Any]], store: str, **chosen: Any) -> Job:
        """Submit the samples as one job and wait for its end."""
        return client.wait(self.submit(client, samples, store, **chosen).id, poll_seconds=0.05)

    def submit(
        self,
        client: SyncStatetapClient,
        samples: Sequence[dict[str, Any]],
        store: str,
        *,
        compression: CompressionName = "none",
        **placement: Any,
    ) -> Job:
        """Submit the samples as one job; by default with shards of 256 rows, so that it has several units."""
        dataset = client.create_dataset(samples, name="samples")
        chosen = PlacementChoice(**{"rows_per_shard": 256, "rows_per_chunk": 64, **placement})
        return client.submit(JobRequest(dataset=dataset.id, store=store, placement=chosen, compression=compression))


@contextmanager
def cluster(folder: Path, model: Path, **runtime: Any) -> Iterator[Cluster]:
    """A cluster without processes yet; all that it starts is ended, and its dump root removed."""
    dumps = Path(tempfile.mkdtemp(prefix="statetap-test-", dir="/dev/shm"))
    made = Cluster(folder, dumps, model, runtime)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(dumps)


def small_model(folder: Path) -> Path:
    """The four-layer Llama with 64 hidden units, saved in float32."""
    return save_model(small_llama(), folder)


def plain_declaration(dumps: Path, name: str, model: Path, **more: Any) -> dict[str, Any]:
    """What a service must be told of a worker of `small_model` that publishes plain dumps."""
    return {
        "kind": "plain",
        "dir": str(dumps / name),
        "aux_layer_ids": [0, 1],
        "final": "both",
        "model_path": str(model),
        "model_fingerprint": MODEL_FINGERPRINT,
        "num_layers": 4,
        "hidden_size": 64,
        "vocab_size": 1024,
        "dtype": "float32",
        "context_length": 512,
        **more,
    }


def token_samples(count: int, *, longest: int = 90, seed: int = 0, shortest: int = 2) -> list[dict[str, Any]]:
    """Samples of random tokens: runs of equal length among them, and different samples of equal length."""
    random = np.random.default_rng(seed)
    lengths = random.integers(shortest, longest + 1, count)
    lengths[1::5] = lengths[0::5][: len(lengths[1::5])]
    return [
        {
            "id": f"s{index}",
            "input_ids": random.integers(0, 1024, length).tolist(),
            "loss_mask": [0, *random.integers(0, 2, length - 2).tolist(), 1] if length > 1 else [1],
        }
        for index, length in enumerate(lengths.tolist())
    ]


def zarr_store(store: str | Path) -> StoreLike:
    """By which zarr-python opens a store, at an object store too."""
    return zarr.storage.ObjectStore(from_url(str(store)), read_only=True) if "://" in str(store) else store


def arrays_of(store: str | Path) -> dict[str, np.ndarray]:
    """Every array of a store, whole, as bytes where its dtype is no numpy number."""
    group = zarr.open_group(zarr_store(store), mode="r")
    found: dict[str, np.ndarray] = {}
    for path, node in group.members(max_depth=None):
        if isinstance(node, zarr.Array):
            found[path] = np.asarray(node[...])
    return found


def assert_same_store(left: str | Path, right: str | Path) -> None:
    """Every byte of every array is equal."""
    a, b = arrays_of(left), arrays_of(right)
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert values.dtype == b[name].dtype, name
        if values.dtype.kind in "iuf":
            assert values.tobytes() == b[name].tobytes(), name
        else:
            assert values.tolist() == b[name].tolist(), name
