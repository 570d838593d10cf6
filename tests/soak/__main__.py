"""`python -m tests.soak`: tens of thousands of small samples through one life of a service, under a trickle of faults.

Exit status 0: what the service holds is flat (the last third of the time against the first, a fifth for warming up left out),
every sample ended stored, bit for bit as undisturbed, or failed with a reason, and nothing is left lying. `make soak ARGS=…`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from tests.soak.readings import Reading, ReadingsFile
from tests.soak.soak import Plan, soaking
from tests.soak.verdict import MIB

SECONDS_A_LINE = 60.0
console = Console()


class Progress:
    """A line a minute."""

    def __init__(self) -> None:
        self._next = 0.0

    def tell(self, reading: Reading) -> None:
        if reading.seconds >= self._next:
            self._next = reading.seconds + SECONDS_A_LINE
            held = f"{reading.memory / MIB:.1f} MiB and {reading.descriptors} descriptors held"
            console.print(f"{reading.seconds:6.0f} s: {reading.requests:,} requests, {held}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Plan()
    parser.add_argument("--samples", type=int, default=usual.samples, metavar="N", help="of all jobs together (%(default)s)")
    parser.add_argument("--distinct", type=int, default=usual.distinct, metavar="N", help="samples to draw from (%(default)s)")
    parser.add_argument("--jobs", type=int, default=usual.jobs, metavar="N", help="each with a store of its own (%(default)s)")
    parser.add_argument("--side-by-side", type=int, default=usual.side_by_side, metavar="N", help="jobs at once (%(default)s)")
    parser.add_argument("--workers", type=int, default=usual.workers, metavar="N", help="embedded workers (%(default)s)")
    parser.add_argument("--kills", type=int, default=usual.kills, metavar="N", help="workers killed and restarted (%(default)s)")
    parser.add_argument("--faults", type=float, default=usual.faults, metavar="SHARE", help="of all requests (%(default)s)")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of samples, faults and kills (%(default)s)")
    parser.add_argument("--readings", type=Path, metavar="FILE", help="write every reading there, as CSV")
    asked = vars(parser.parse_args())
    readings: Path | None = asked.pop("readings")
    plan = Plan(**asked)
    if plan.samples > plan.jobs * plan.distinct:
        parser.error(f"a job takes at most {plan.distinct} samples: ask for more jobs")
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="statetap-soak-"))
        progress = Progress()
        lines = None
        if readings is not None:
            lines = ReadingsFile(opened.enter_context(readings.open("w", newline="", encoding="utf-8")))
        console.print(f"{plan.workers} workers start, and store {plan.distinct:,} samples undisturbed")
        soak = opened.enter_context(soaking(plan, Path(folder)))

        def tell(reading: Reading) -> None:
            progress.tell(reading)
            if lines is not None:
                lines.add(reading)

        soaked = soak.run(tell)
    console.print(soaked.table())
    return 1 if soaked.short else 0


if __name__ == "__main__":
    sys.exit(main())
