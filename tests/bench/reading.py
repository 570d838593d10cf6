"""Whole samples in random order: our reader against `torch.load` of a file a sample, as SpecForge stores them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.ports import SampleColumns, StorePlan, TokenBlock
from statetap_client.layout import Status
from statetap_client.reader import SampleBuffer, StoreReader
from statetap_client.stored_samples import StoredSamples
from torch.utils.data import DataLoader

from tests.bench import peers
from tests.bench.interleaved import Measured, Way, measure, times_faster
from tests.bench.material import Material, forget
from tests.bench.rows import Row
from tests.fakes.store_on_disk import attributes

TORCH, OURS, DIRECT = "torch.load", "StoreReader into a buffer", "StoreReader, past the page cache"


def rows(material: Material, disk: Path, rounds: int) -> list[Row]:
    store, files = disk / "store", disk / "files"
    asyncio.run(_store(material, store))
    peers.specforge(material, files)
    checkpoints = sorted(files.iterdir())
    everything = [path for path in disk.rglob("*") if path.is_file()]
    order = list(range(len(checkpoints)))
    random.Random(0).shuffle(order)
    reader, direct, buffer = StoreReader(store, direct=False), StoreReader(store, direct=True), SampleBuffer()

    def load() -> None:
        for index in order:
            _used(torch.load(checkpoints[index]))

    def read(from_reader: StoreReader) -> None:
        for index in order:
            sample = from_reader.sample(index, buffer=buffer)
            _used({"aux": sample.aux_hidden_states, "last": sample.last_hidden_states})

    todo: dict[str, Callable[[], None]] = {TORCH: load, OURS: partial(read, reader), DIRECT: partial(read, direct)}
    cold = measure({name: Way(run, before=partial(forget, everything)) for name, run in todo.items()}, rounds)
    for run in todo.values():
        run()
    warm = measure({name: Way(run) for name, run in todo.items() if name != DIRECT}, rounds)
    loaders = {
        TORCH: _loader(_Checkpoints(checkpoints)),
        "StoredSamples": _loader(StoredSamples(reader)),
    }
    loaded = measure({name: Way(partial(_consume, loader)) for name, loader in loaders.items()}, rounds)
    gigabytes = material.nbytes / 1e9
    best_cold = max((OURS, DIRECT), key=lambda name: times_faster(cold, name, TORCH))

    def figures(measured: Mapping[str, Measured], how: str) -> dict[str, float]:
        return {f"{name}, {how}, MB/s": gigabytes * 1e3 / one.median for name, one in measured.items()}

    return [
        Row(
            "random whole samples, cold, against torch.load",
            times_faster(cold, best_cold, TORCH),
            "x",
            2.0,
            details=figures(cold, "cold")
            | {f"{OURS}, cold, x": times_faster(cold, OURS, TORCH), f"{DIRECT}, cold, x": times_faster(cold, DIRECT, TORCH)},
        ),
        Row(
            "random whole samples, warm, against torch.load",
            times_faster(warm, OURS, TORCH),
            "x",
            2.0,
            details=figures(warm, "warm"),
        ),
        Row(
            "the same through a DataLoader with 2 workers",
            times_faster(loaded, "StoredSamples", TORCH),
            "x",
            1.25,
            details=figures(loaded, "2 workers"),
        ),
    ]


class _Checkpoints:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, item: int) -> Any:
        return torch.load(self.paths[item])


def _loader(samples: Any) -> DataLoader[Any]:
    return DataLoader(
        samples, batch_size=None, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )


def _consume(loader: DataLoader[Any]) -> None:
    for sample in loader:
        if isinstance(sample, dict):
            _used({"aux": sample["aux_hidden_state"], "last": sample["hidden_state"]})
        else:
            _used({"aux": sample.aux_hidden_states, "last": sample.last_hidden_states})


def _used(tensors: dict[str, Any]) -> None:
    """Every page of the hidden states was looked at: a tensor that is only promised does not count."""
    for tensor in tensors.values():
        if tensor.dtype == torch.bfloat16:
            tensor.view(torch.uint8).flatten()[:: os.sysconf("SC_PAGE_SIZE")].max()


async def _store(material: Material, path: Path) -> None:
    units = material.units(path)
    starts = [unit.row_start + s.row for _, unit in units for s in unit.segments if s.array == material.arrays[0].name]
    count = len(material.files)
    store, writer = ZarrStore(), LocalShardWriter()
    geometry = units[0][1].geometry
    rows = len(units) * units[0][1].rows
    await store.prepare(
        str(path.absolute()),
        StorePlan(arrays=material.arrays, geometry=geometry, rows=rows, samples=count, attributes=attributes()),
    )
    tokens = np.arange(material.rows, dtype=np.int32)
    await store.write_tokens(str(path.absolute()), [TokenBlock(s, tokens, np.ones(len(tokens), np.uint8)) for s in starts])
    for _, unit in units:
        await writer.write(unit)
    columns = SampleColumns(
        first=0,
        ids=[str(i) for i in range(count)],
        row_start=np.array(starts, np.int64),
        length=np.full(count, material.rows, np.int32),
        status=np.full(count, Status.STORED, np.uint8),
        next_token=np.zeros(count, np.int32),
        digest=np.zeros(count, np.uint64),
    )
    await store.write_samples(str(path.absolute()), columns)
    writer.close()
