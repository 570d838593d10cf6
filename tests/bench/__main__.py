"""`make bench`: what the data plane does on this machine. Every figure is a ratio within one run, interleaved, by medians."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from pathlib import Path

import torch
import zarr

from tests.bench import batches, orchestrator, planning, publishing, reading, report, writing
from tests.bench.material import publish
from tests.bench.rows import Row
from tests.fakes.mounts import tmpfs

PARTS = ("writing", "publishing", "reading", "batches", "orchestrator", "planning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="rows of a sample")
    parser.add_argument("--hidden", type=int, default=7168, help="hidden size; 3 layers and a final state, bfloat16")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("var"), help="a folder on the disk to write to")
    parser.add_argument("--only", choices=PARTS, help="part of it")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the orchestrator's rows")
    parser.add_argument("--planned", type=int, default=1_000_000, help="samples of the job that is planned")
    parser.add_argument("--save", type=Path, default=Path("var/bench"), help="where bench.json and bench.svg go")
    options = parser.parse_args()
    options.disk.mkdir(parents=True, exist_ok=True)
    shared = Path(tempfile.mkdtemp(prefix="statetap-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="bench-", dir=options.disk))
    rows: list[Row] = []
    nbytes = 0
    busy = os.getloadavg()[0]
    try:
        if options.only in (None, "writing", "reading"):
            material = publish(shared / "dumps", options.samples, options.rows, options.hidden)
            nbytes = material.nbytes
            if options.only != "reading":
                # What an administrator does by `mount -o remount,huge=within_size /dev/shm`.
                with tmpfs(shared / "large", "huge=within_size") as refused:
                    large = (
                        None if refused else publish(shared / "large" / "dumps", options.samples, options.rows, options.hidden)
                    )
                    rows += writing.rows(material, large, shared, disk, options.rounds)
            if options.only != "writing":
                rows += reading.rows(material, disk, options.rounds)
        if options.only in (None, "publishing"):
            rows += publishing.rows(shared / "publishing", options.samples, options.rows, options.hidden, options.rounds)
        if options.only in (None, "batches"):
            rows += batches.rows(disk, options.rounds)
        if options.only in (None, "orchestrator"):
            rows += orchestrator.rows(disk, options.seconds)
        if options.only in (None, "planning"):
            rows += planning.rows(disk, options.planned)
    finally:
        shutil.rmtree(shared)
        shutil.rmtree(disk)
    title = f"{options.samples} samples of {options.rows} rows, {nbytes / 1e6:.0f} MB, medians of {options.rounds}"
    report.show(rows, title)
    facts = {
        "what": title,
        "cores": os.cpu_count(),
        "load at the start": f"{busy:.1f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zarr": zarr.__version__,
    }
    report.save(rows, facts, options.save)


if __name__ == "__main__":
    main()
