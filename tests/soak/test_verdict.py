"""Every criterion of a soak can be short, and says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from tests.soak.readings import Reading
from tests.soak.verdict import Soaked

MIB = 1 << 20
FLAT = Reading(
    seconds=0.0, requests=0, memory=100 * MIB, shared=10 * MIB, descriptors=60, threads=12, tasks=40, dumps=MIB, workers=900 * MIB
)
WELL = Soaked(
    samples=100,
    stored=99,
    failed=Counter(request_failed=1),
    unexplained=(),
    wrong=(),
    left=(),
    still_held=(),
    errors=0,
    readings=[FLAT] * 30,
    requests=104,
    faults=Counter({"dump torn": 4}),
    kills=1,
    seconds=10.0,
)


def rising(what: str, most: float) -> Soaked:
    """One that ends with so much more of something than it began with."""
    first = getattr(FLAT, what)
    return replace(WELL, readings=[replace(FLAT, **{what: round(first * (1 + most * n / 29))}) for n in range(30)])


def test_a_flat_one_meets_everything() -> None:
    assert WELL.short == []
    assert rising("memory", 0.05).short == []


@pytest.mark.parametrize(
    ("soaked", "name"),
    [
        (replace(WELL, stored=98), "samples that ended"),
        (replace(WELL, unexplained=("sample 3 of job j is failed",)), "samples that ended"),
        (replace(WELL, wrong=("job j: layers/1 has other bytes than undisturbed",)), "samples stored with other bytes"),
        (replace(WELL, left=("req_1.safetensors was left",)), "dumps, answers and temporary files left"),
        (replace(WELL, still_held=("1 more descriptors of a pipe",)), "held by the idle service"),
        (replace(WELL, errors=1), "errors in the log"),
        (rising("memory", 0.1), "service: memory of its own"),
        (rising("shared", 2.0), "service: resident memory"),
        (rising("descriptors", 0.2), "service: descriptors"),
        (rising("threads", 0.5), "service: threads"),
        (rising("tasks", 0.2), "service: tasks"),
    ],
)
def test_what_is_short_is_named(soaked: Soaked, name: str) -> None:
    assert soaked.short[0].name.startswith(name)


@pytest.mark.parametrize("soaked", [WELL, replace(WELL, wrong=("job j: [layer] has other bytes",))])
def test_the_table_tells_every_criterion_and_what_to_look_at(soaked: Soaked) -> None:
    console = Console(width=250)
    with console.capture() as captured:
        console.print(soaked.table())
    text = captured.get()
    for criterion in soaked.criteria():
        assert criterion.name in text
        for problem in criterion.problems:
            assert problem in text
    assert "4 dump torn" in text
