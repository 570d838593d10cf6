"""A small part of `make fuzz`, and that it would notice."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest

from tests.fuzz.extremes import run_extreme
from tests.fuzz.targets import Target, try_one


def test_a_few_thousand_inputs_break_nothing(tmp_path) -> None:
    """In a process of its own: its memory is bounded."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "2500", "--no-extremes", "--keep", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 faults, " in ran.stdout
    # A target that takes everything, or refuses everything in one way, tests nothing.
    ways = {
        line.split("  ")[0]: int(found[1]) for line in ran.stdout.splitlines() if (found := re.search(r"in +(\d+) ways", line))
    }
    assert len(ways) >= 9
    assert ways["dump"] > 20
    assert ways["samples, plain template"] > 20


@pytest.mark.parametrize("name", ["header of 2^63 bytes", "zip bomb"])
def test_what_is_too_much_is_refused_cheaply(name: str) -> None:
    extreme = run_extreme(name)
    assert extreme.fault is None
    assert extreme.peak_mib < 512


def judged(read) -> str | None:
    fault = try_one(Target("it", [b"seed"], read, KeyError, weight=1), 0, 0.2)
    return None if fault is None else fault.what


def test_only_the_documented_error_is_a_refusal() -> None:
    def documented(data: bytes, rng: random.Random) -> None:
        raise KeyError("documented")

    def undocumented(data: bytes, rng: random.Random) -> None:
        raise IndexError("undocumented")

    def slow(data: bytes, rng: random.Random) -> None:
        sum(range(50_000_000))

    assert judged(lambda data, rng: None) is None
    assert judged(documented) is None
    assert judged(undocumented) == "IndexError: undocumented"
    assert (judged(slow) or "").endswith("s of CPU")
