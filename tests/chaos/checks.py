"""What must hold once a job on real processes is over, whatever befell it: each check returns what is wrong."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from statetap_client.layout import Status
from statetap_client.reader import StoreReader
from statetap_sglang.format import DumpFormatError
from statetap_sglang.reader import open_dump

from tests.chaos.processes import ChaosCluster
from tests.fakes.cluster import arrays_of


class Reference:
    """What an undisturbed run stored of every sample, by its id."""

    def __init__(self, store: str) -> None:
        reader = StoreReader(store)
        self._samples = {reader.ids[index]: reader.sample_as_numpy(index) for index in reader.stored.tolist()}
        self._digests = {reader.ids[index]: reader.recorded_digest(index) for index in reader.stored.tolist()}

    def compare(self, store: str, samples: Sequence[Mapping[str, Any]]) -> list[str]:
        """Every byte of a store of these samples: theirs where they are stored, zero elsewhere, and what it says of them."""
        reader, arrays = StoreReader(store), arrays_of(store)
        if reader.ids != [sample["id"] for sample in samples]:
            return [f"the store's samples are {reader.ids}"]
        problems = []
        wanted = {name: np.zeros_like(arrays[name]) for name in (*reader.hidden_arrays, "input_ids", "loss_mask")}
        for index, sample in enumerate(samples):
            rows = slice(*reader.row_range(index))
            wanted["input_ids"][rows], wanted["loss_mask"][rows] = sample["input_ids"], sample["loss_mask"]
            if reader.statuses[index] == Status.STORED:
                undisturbed = self._samples[sample["id"]]
                for name in reader.hidden_arrays:
                    wanted[name][rows] = getattr(undisturbed, name)
                if reader.recorded_digest(index) != self._digests[sample["id"]]:
                    problems.append(f"sample {index} has another digest than undisturbed")
                if arrays["samples/next_token"][index] != undisturbed.next_token:
                    problems.append(f"sample {index} has another next token than undisturbed")
        differing = [name for name in wanted if wanted[name].tobytes() != arrays[name].tobytes()]
        return problems + [f"{name} has other bytes than undisturbed" for name in differing]


@dataclass(frozen=True)
class AtDeath:
    """Samples that a killed service had: committed, or answered with their dumps whole; and how often each was asked for."""

    kept: frozenset[int]
    asked: Mapping[int, int]

    def asked_again(self, asked: Mapping[int, int]) -> list[int]:
        return [sample for sample in sorted(self.kept) if asked[sample] > self.asked[sample]]


def at_death(cluster: ChaosCluster, job: str | None, asked: Mapping[int, int]) -> AtDeath:
    """Look at the ledger, the journals and the dumps of a service that is dead."""
    there = {rid for path in cluster.dumps.glob("*/*/req_*.safetensors") if (rid := _rid_of(path)) is not None}
    kept = set()
    for journal in (cluster.folder / "data" / "answers").glob(f"{job}-*.ndjson"):
        for line in journal.read_bytes().split(b"\n")[:-1]:
            rid, sample, *_ = orjson.loads(line)
            if rid in there:
                kept.add(sample)
    stored = "SELECT sample FROM samples JOIN jobs ON samples.job = jobs.number WHERE jobs.id = ? AND status = 1"
    kept.update(sample for (sample,) in _query(cluster, stored, job))
    return AtDeath(frozenset(kept), dict(asked) | {sample: asked[sample] for sample in kept})


def _rid_of(path: Path) -> str | None:
    if path.is_symlink():
        return None
    try:
        with open_dump(path) as dump:
            return dump.metadata.rid
    except (DumpFormatError, FileNotFoundError):
        return None


def _query(cluster: ChaosCluster, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(cluster.folder / "data" / "ledger.db", timeout=30)) as database:
        return database.execute(query, values).fetchall()


def unfinished_units(cluster: ChaosCluster, job: str) -> list[str]:
    """Leases that nobody holds any more, and units that nobody did."""
    states = "SELECT unit, units.state FROM units JOIN jobs ON units.job = jobs.number WHERE jobs.id = ?"
    return [f"unit {unit} is {state}" for unit, state in _query(cluster, states, job) if state != "committed"]


def leftovers(cluster: ChaosCluster, job: str, store: str) -> list[str]:
    """Files that should be gone: dumps, error records, answers, and whatever has a temporary name."""
    relays = [proxy.relay for proxy in cluster.proxies.proxies.values()]
    foreign = {path for relay in relays for path in (*relay.foreign, *relay.unfinished)}
    dumps = [path for path in cluster.dumps.rglob("*req_*") if path not in foreign]
    answers = list((cluster.folder / "data" / "answers").glob(f"{job}-*"))
    partial = [path for path in Path(store).rglob("*") if path.name.startswith(".") or "partial" in path.name]
    datasets = list((cluster.folder / "data" / "datasets").rglob(".*"))
    return [f"{path} was left" for path in (*dumps, *answers, *partial, *datasets)]


def harmed_foreigners(cluster: ChaosCluster) -> list[str]:
    """What is somebody else's and is not there any more."""
    foreign = {path for proxy in cluster.proxies.proxies.values() for path in proxy.relay.foreign}
    return [
        f"{path} is somebody else's, and was removed" for path in sorted(foreign) if not path.is_symlink() and not path.exists()
    ]


def until_nothing(look: Callable[[], list[str]], seconds: float = 8.0) -> list[str]:
    """What is still there when it should be gone by now."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
