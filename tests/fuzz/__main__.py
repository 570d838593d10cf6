"""`python -m tests.fuzz`: many nearly valid inputs to everything that parses what others wrote.

Each must be taken or refused with the documented error, within a bounded time, in a process whose memory the kernel bounds.
Exit status 0: all were. 1: some were not; the inputs are kept, and said how to have again. 2: usage.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import datasets, dumps
from tests.fuzz.extremes import EXTREMES, run_extreme
from tests.fuzz.targets import Fault, Target, try_one

MEMORY_BYTES = 512 << 20
"""What a run may take beyond what it has once everything is loaded."""
LIMIT_SECONDS = 5.0


def bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def warm_up(targets: list[Target]) -> None:
    """Have every library loaded, and every pool of threads started, before memory is bounded."""
    for target in targets:
        for number in range(20):
            try_one(target, -1 - number, 60.0)
        target.taken = target.refused = 0
        target.slowest_seconds = 0.0


def fuzz(targets: list[Target], inputs: int, first: int, limit_seconds: float) -> list[Fault]:
    weights = sum(target.weight for target in targets)
    tried = (
        try_one(target, number, limit_seconds)
        for target in targets
        for number in range(first, first + -(-inputs * target.weight // weights))
    )
    return [fault for fault in tried if fault is not None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, over all targets")
    parser.add_argument("--first", type=int, default=0, help="the number of each target's first input")
    parser.add_argument("--only", default="", help="a target's name, or the beginning of it")
    parser.add_argument("--keep", type=Path, default=Path("var/fuzz"), help="where inputs that broke something are put")
    parser.add_argument("--no-extremes", action="store_true", help="leave out what is too much rather than broken")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="statetap-fuzz-", dir="/dev/shm") as folder:
        targets = [*dumps.targets(Path(folder)), *datasets.targets(Path(folder))]
        targets = [target for target in targets if target.name.startswith(options.only)]
        if not targets:
            parser.error(f"no target is called {options.only}")
        warm_up(targets)
        bound_memory()
        faults = fuzz(targets, options.inputs, options.first, LIMIT_SECONDS)
    for target in targets:
        print(
            f"{target.name:26} {target.taken + target.refused:7,} inputs  {target.taken:7,} taken  {target.refused:7,} refused "
            f"in {len(target.reasons):3} ways  slowest {target.slowest_seconds:5.2f} s"
        )
    for fault in faults[:50]:
        options.keep.mkdir(parents=True, exist_ok=True)
        kept = options.keep / f"{fault.target.replace(' ', '-')}-{fault.seed}"
        kept.write_bytes(fault.data)
        print(f"FAULT {fault.target}: {fault.what[:300]}; kept as {kept}")
        print(f"  again: python -m tests.fuzz --only '{fault.target}' --first {fault.seed} --inputs 1")
    too_much = [] if options.no_extremes else [run_extreme(name) for name in EXTREMES]
    for extreme in too_much:
        print(f"{extreme.name:26} {extreme.seconds:6.1f} s of CPU  peak {extreme.peak_mib:5,} MiB  {extreme.ending[:100]}")
        if extreme.fault is not None:
            print(f"FAULT {extreme.name}: {extreme.fault}")
    total = sum(target.taken + target.refused for target in targets)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    wrong = len(faults) + sum(extreme.fault is not None for extreme in too_much)
    print(f"{total:,} inputs, {wrong} faults, {time.monotonic() - began:.0f} s, peak {peak} MiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
