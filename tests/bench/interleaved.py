"""Ways of doing the same thing, measured in turn, round after round: a machine's moods then meet all of them alike."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Measured:
    """One entry a round: wall seconds, and CPU seconds of this process, its threads and its children that have ended."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu_seconds)


@dataclass(frozen=True, slots=True)
class Way:
    """What is timed, and what comes before and after it untimed."""

    run: Callable[[], None]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


def measure(ways: Mapping[str, Way], rounds: int) -> dict[str, Measured]:
    measured = {name: Measured() for name in ways}
    for turn in range(rounds):
        for name, way in ways.items():
            sys.stderr.write(f"\r\x1b[Kround {turn + 1} of {rounds}: {name}")
            sys.stderr.flush()
            way.before()
            began, used = time.perf_counter(), _cpu_seconds()
            way.run()
            measured[name].seconds.append(time.perf_counter() - began)
            measured[name].cpu_seconds.append(_cpu_seconds() - used)
            way.after()
    sys.stderr.write("\r\x1b[K")
    return measured


def times_faster(measured: Mapping[str, Measured], fast: str, slow: str) -> float:
    """How many times faster one way is than another: the median of the rounds' ratios."""
    pairs = zip(measured[slow].seconds, measured[fast].seconds, strict=True)
    return statistics.median(slower / faster for slower, faster in pairs)


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
