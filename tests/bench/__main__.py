"""`make bench`: what the data plane does on this machine. Every figure is a ratio within one run, interleaved, by medians."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.core.placement import choose_geometry
from statetap.core.spec import HiddenArray
from statetap.ports import Segment, UnitWrite
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.reader import open_dump

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

LAYERS, HIDDEN, DTYPE = 3, 4096, "bfloat16"
ARRAYS = (HiddenArray("aux_hidden_states", (LAYERS, HIDDEN), DTYPE), HiddenArray("last_hidden_states", (HIDDEN,), DTYPE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="rows of a sample")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("var"), help="a folder on the disk to write to")
    options = parser.parse_args()
    options.disk.mkdir(exist_ok=True)
    shared = Path(tempfile.mkdtemp(prefix="statetap-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="bench-", dir=options.disk))
    try:
        measure(shared, disk, options.samples, options.rows, options.rounds)
    finally:
        shutil.rmtree(shared)
        shutil.rmtree(disk)


def measure(shared: Path, disk: Path, samples: int, rows: int, rounds: int) -> None:
    files = publish(shared / "dumps", samples, rows)
    nbytes = sum(file.stat().st_size for file in files)
    ways: dict[str, Callable[[Path], None]] = {
        "cp and fsync of the same dumps": lambda target: copy(files, target),
        "dumps in shared memory to durable shards": lambda target: asyncio.run(write(files, target, rows)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in ways.items():
            target = disk / f"{turn}-{len(name)}"
            began, used = time.perf_counter(), cpu_seconds()
            way(target)
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(cpu_seconds() - used)
            shutil.rmtree(target)
    base = statistics.median(seconds["cp and fsync of the same dumps"])
    table = Table(title=f"{samples} samples of {rows} rows, {nbytes / 1e6:.0f} MB, medians of {rounds}", title_justify="left")
    for column in ("what", "MB/s", "x cp", "CPU-s/GB"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name in ways:
        median = statistics.median(seconds[name])
        per_gigabyte = statistics.median(cpu[name]) / (nbytes / 1e9)
        table.add_row(name, f"{nbytes / median / 1e6:.0f}", f"{base / median:.2f}", f"{per_gigabyte:.2f}")
    Console(width=100).print(table)


def publish(root: Path, samples: int, rows: int) -> list[Path]:
    """Dumps of random rows, as a worker would publish them."""
    beacon = make_beacon(aux_layer_ids=tuple(range(LAYERS)), hidden_size=HIDDEN, final="post_norm", budget_bytes=1 << 40)
    root.mkdir(mode=0o700)
    publisher = DumpPublisher(root, "bench", beacon)
    names = [
        publisher.publish(make_metadata(f"r{number}", rows), make_tensors(beacon, rows, seed=number)) for number in range(samples)
    ]
    publisher.close()
    return [publisher.directory / name for name in names]


def copy(files: list[Path], target: Path) -> None:
    target.mkdir()
    subprocess.run(["cp", *files, target], check=True)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


async def write(files: list[Path], target: Path, rows: int) -> None:
    geometry = choose_geometry(ARRAYS)
    per_unit = max(geometry.rows_per_shard // rows, 1)
    writer = LocalShardWriter()
    dumps = [open_dump(file) for file in files]
    units = [dumps[first : first + per_unit] for first in range(0, len(dumps), per_unit)]
    for number, unit in enumerate(units):
        segments = [Segment(a.name, i * rows, dump.tensors[a.name].data) for a in ARRAYS for i, dump in enumerate(unit)]
        start = number * geometry.rows_per_shard
        await writer.write(
            UnitWrite(
                location=str(target.absolute()),
                arrays=ARRAYS,
                geometry=geometry,
                row_start=start,
                rows=geometry.rows_per_shard,
                fence=1,
                segments=segments,
            )
        )
    writer.close()


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return float(np.sum(times[:4]))


if __name__ == "__main__":
    main()
