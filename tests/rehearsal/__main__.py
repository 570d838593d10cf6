"""`python -m tests.rehearsal`: the whole job, 37,000 samples, through one service, with workers that only publish.

Exit status 0: all samples are stored, every digest and every byte that was read back is right, and what the service holds is
flat (the last third of the time against the first, a fifth of warming up left out). The store is emptied behind the service,
unit by unit, so that a few gigabytes of disk do. The width is reduced by default: `--hidden 7168` is the whole, 5 TB of it; with
`--null` the disk is not waited for. `make rehearsal ARGS=…`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tests.rehearsal.rehearsal import Plan, rehearsing
from tests.rehearsal.verdict import Look, scale
from tests.soak.verdict import MIB

SECONDS_A_LINE = 30.0
console = Console()


class Progress:
    """A line every half minute."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._next = 0.0

    def tell(self, look: Look) -> None:
        if look.seconds >= self._next:
            self._next = look.seconds + SECONDS_A_LINE
            own, dumps = look.anonymous / MIB, look.shared / MIB
            held = f"{own:,.1f} MiB of its own, {dumps:,.0f} MiB of dumps, {look.descriptors} descriptors"
            console.print(f"{look.seconds:6.0f} s: {look.stored:,} of {self._samples:,} stored; {held}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rehearsal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Plan()
    parser.add_argument("--samples", type=int, default=usual.samples, metavar="N", help="%(default)s")
    parser.add_argument("--median", type=int, default=usual.median, metavar="TOKENS", help="of a sample (%(default)s)")
    parser.add_argument("--longest", type=int, default=usual.longest, metavar="TOKENS", help="at most (%(default)s)")
    parser.add_argument("--hidden", type=int, default=usual.hidden, metavar="H", help="width of a state (%(default)s)")
    parser.add_argument("--workers", type=int, default=usual.workers, metavar="N", help="%(default)s")
    parser.add_argument(
        "--delay", type=float, default=usual.delay, metavar="SECONDS", help="a worker's, per request (%(default)s)"
    )
    parser.add_argument("--every", type=int, default=usual.every, metavar="N", help="of N shards two are read back (%(default)s)")
    parser.add_argument("--null", action="store_true", help="assemble all shards, write only those that are read back")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of lengths (%(default)s)")
    parser.add_argument("--disk", type=Path, default=Path("var"), metavar="FOLDER", help="where the store is (%(default)s)")
    parser.add_argument(
        "--dumps", type=Path, default=Path("/dev/shm"), metavar="FOLDER", help="where the workers publish (%(default)s)"
    )
    asked = vars(parser.parse_args())
    disk: Path = asked.pop("disk")
    shared: Path = asked.pop("dumps")
    disk.mkdir(parents=True, exist_ok=True)
    plan = Plan(**asked)
    tokens = sum(plan.lengths())
    console.print(scale(plan.samples, plan.hidden, tokens, tokens * plan.row_bytes))
    with rehearsing(plan, disk, shared) as rehearsal:
        rehearsed = rehearsal.run(Progress(plan.samples).tell)
    console.print(rehearsed.table())
    return 1 if rehearsed.short else 0


if __name__ == "__main__":
    sys.exit(main())
