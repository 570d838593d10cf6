"""`python -m tests.chaos`: draw schedules of faults, run them, and say what became of each. `make chaos ARGS=…`.

Exit status 0: every sample of every schedule ended stored, bit for bit, or failed for a reason that its schedule explains.
A schedule is its seed: `--virtual 1 --processes 0 --first 227` runs one again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

from tests.chaos.on_processes import Draw, ProcessSchedules, deaths, draw
from tests.chaos.outcome import Outcome, table
from tests.chaos.processes import chaos_cluster
from tests.chaos.virtual import run_virtual
from tests.fakes.cluster import small_model

console = Console()


def virtual(first: int, count: int) -> Iterator[Outcome]:
    """So many schedules in virtual time, on every core."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(run_virtual, range(first, first + count))


def on_processes(first: int, count: int, *, each_step: bool, costly: bool) -> Iterator[Outcome]:
    """So many schedules on real processes, and before them one kill before and after each persisted step."""
    with tempfile.TemporaryDirectory(prefix="statetap-chaos-") as folder:
        model = small_model(Path(folder) / "llama")
        (Path(folder) / "cluster").mkdir()
        with chaos_cluster(Path(folder) / "cluster", model) as cluster:
            if not cluster.may_mount:
                console.print("no file system can be mounted here: faults that fill one are left out")
            schedules = ProcessSchedules.begin(cluster)
            draws: list[Draw] = list(deaths()) if each_step else []
            draws += [draw(seed, may_mount=cluster.may_mount, costly=costly) for seed in range(first, first + count)]
            for drawn in draws:
                yield schedules.run(drawn)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", type=int, default=220, metavar="N", help="schedules in virtual time (%(default)s)")
    parser.add_argument("--processes", type=int, default=70, metavar="N", help="schedules on real processes (%(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (%(default)s)")
    parser.add_argument("--no-steps", action="store_true", help="leave out the kills before and after each persisted step")
    parser.add_argument("--no-costly", action="store_true", help="leave out faults that cost many seconds each")
    asked = parser.parse_args()
    outcomes: list[Outcome] = []

    def take(more: Iterator[Outcome]) -> None:
        for outcome in more:
            outcomes.append(outcome)
            console.print(outcome.line, style="red" if outcome.problems else None, markup=False, highlight=False)
            for problem in outcome.problems:
                console.print(f"    {problem}", markup=False, highlight=False)

    take(virtual(asked.first, asked.virtual))
    if asked.processes or not asked.no_steps:
        take(on_processes(asked.first, asked.processes, each_step=not asked.no_steps, costly=not asked.no_costly))
    console.print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.problems]
    console.print(f"{len(outcomes)} schedules, {len(wrong)} wrong; {sum(outcome.seconds for outcome in outcomes):.0f} s of them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
