"""What a process holds, looked at again and again, and whether that grows: the first third of the readings against the last."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TextIO


@dataclass(frozen=True)
class Reading:
    """One look at the service. Sizes are bytes.

    `memory` is its own (RssAnon and RssFile of /proc/PID/status), which is where a leak shows; `shared` are pages of mapped dumps
    (RssShmem), which come and go; `rss` is both. `workers` is the memory of all workers, shared pages left out.
    """

    seconds: float
    requests: int
    memory: int
    shared: int
    descriptors: int
    threads: int
    tasks: int
    dumps: int
    workers: int

    @property
    def rss(self) -> int:
        return self.memory + self.shared


@dataclass(frozen=True)
class Held:
    """What the kernel says of a process; bytes by kind of page."""

    anonymous: int
    files: int
    shared: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        said = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())

        def size(name: str) -> int:
            return int(said[name].removesuffix("kB")) << 10

        descriptors = sum(1 for _ in (process / "fd").iterdir())
        return cls(size("RssAnon"), size("RssFile"), size("RssShmem"), descriptors, int(said["Threads"]))

    @property
    def memory(self) -> int:
        """Its own."""
        return self.anonymous + self.files


def thirds(readings: Sequence[Any], what: str) -> tuple[float, float]:
    """The medians of the first and the last third."""
    third = -(-len(readings) // 3)
    values = [getattr(reading, what) for reading in readings]
    return median(values[:third]), median(values[-third:])


class ReadingsFile:
    """Writes each reading as a line of CSV, at once: a soak that is cut short has told what it saw."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writer = csv.DictWriter(file, [field.name for field in fields(Reading)])
        self._writer.writeheader()

    def add(self, reading: Reading) -> None:
        self._writer.writerow(asdict(reading))
        self._file.flush()
