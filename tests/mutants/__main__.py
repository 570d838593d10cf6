"""`python -m tests.mutants [NAME ...]`: plant every known bug, each in a copy of the tree, and see that its check notices.

Exit status 0: all were caught. 1: some survived, or could not be tried. 2: usage.
"""

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.copies import CAUGHT, Unusable, copy_tree, plant, require_imports_from, run
from tests.mutants.mutant import Command, Mutant, Pytest

AT_ONCE = 2


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `caught`, `SURVIVED`, or why it could not be tried; `output` is the check's."""

    word: str
    seconds: float
    output: str = ""


def try_mutant(mutant: Mutant, clean: Path, copy: Path) -> Outcome:
    began = time.monotonic()
    try:
        shutil.copytree(clean, copy, symlinks=True)
        plant(mutant, copy)
        ran = run(mutant.catcher, copy)
    except Unusable as reason:
        return Outcome(str(reason), time.monotonic() - began)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    word = {0: "SURVIVED", CAUGHT: "caught"}.get(ran.returncode, f"its check did not run: exit status {ran.returncode}")
    return Outcome(word, time.monotonic() - began, ran.stdout)


def baseline(catcher: Pytest | Command, copy: Path) -> str | None:
    """None if the check passes without a bug, else its output."""
    ran = run(catcher, copy)
    return None if ran.returncode == 0 else ran.stdout


def say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def part(text: str) -> tuple[int, int]:
    """`0/4` → (0, 4): the part, and of how many."""
    number, of = map(int, text.split("/"))
    if not 0 <= number < of <= len(CATALOGUE):
        raise ValueError(f"no part {number} of {of}")
    return number, of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; default: all")
    parser.add_argument("--no-baseline", action="store_true", help="do not first see that every check passes without a bug")
    parser.add_argument(
        "--part", type=part, default=(0, 1), metavar="N/OF", help="every OF-th of them only, from the N-th (0 is the first)"
    )
    asked = parser.parse_args()
    names = asked.names
    known = {mutant.name: mutant for mutant in CATALOGUE}
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    first, step = asked.part
    chosen = [known[name] for name in names or known][first::step]

    with tempfile.TemporaryDirectory(prefix="statetap-mutants-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        clean = copy_tree(Path(folder) / "clean")
        require_imports_from(clean)
        catchers = [] if asked.no_baseline else list(dict.fromkeys(mutant.catcher for mutant in chosen))
        failing = [output for output in pool.map(lambda catcher: baseline(catcher, clean), catchers) if output is not None]
        if failing:
            say(*failing, "the checks above fail without any planted bug: mend that first")
            return 1
        width = max(len(mutant.name) for mutant in chosen)
        lost = 0
        outcomes = pool.map(lambda mutant: try_mutant(mutant, clean, Path(folder) / mutant.name), chosen)
        for mutant, outcome in zip(chosen, outcomes, strict=True):
            caught = outcome.word == "caught"
            lost += not caught
            say(f"{mutant.name:{width}}  {outcome.word:8}  {outcome.seconds:5.1f} s  {mutant.breaks}")
            if not caught and outcome.output:
                say(outcome.output)
    say(f"{len(chosen) - lost} of {len(chosen)} planted bugs caught")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
