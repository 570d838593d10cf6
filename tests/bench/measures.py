"""What a process uses, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Self

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of a process and all its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def memory_bytes(pid: int, *kinds: str) -> int:
    """The sum of these lines of /proc/<pid>/status, such as `RssAnon`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.partition(":")[0] in kinds)


class Peak:
    """The highest that `measure` gives while this is entered, looked at a hundred times a second."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self.highest = 0
        self._measure = measure
        self._over = Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.highest = max(self.highest, self._measure())
