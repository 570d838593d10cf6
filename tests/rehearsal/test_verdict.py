"""Every criterion of a rehearsal can be short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.rehearsal.verdict import Look, Rehearsed
from tests.soak.verdict import MIB

FLAT = Look(seconds=0.0, stored=0, anonymous=200 * MIB, files=90 * MIB, shared=1000 * MIB, descriptors=60, threads=20)
WELL = Rehearsed(
    samples=100,
    tokens=200_000,
    row_bytes=2048,
    hidden=256,
    workers=8,
    budget_bytes=150 * MIB,
    null=False,
    state="completed",
    stored=100,
    units=2,
    read_back=5,
    wrong_records=(),
    wrong_bytes=(),
    left=(),
    looks=[FLAT] * 30,
    seconds=10.0,
    planning_seconds=1.0,
    service_cpu_seconds=5.0,
    object_bytes=500_000_000,
)


def rising(what: str) -> list[Look]:
    return [replace(FLAT, **{what: getattr(FLAT, what) * (30 + number) // 30}) for number in range(30)]


def test_one_that_went_well_is_short_of_nothing() -> None:
    assert WELL.short == []


@pytest.mark.parametrize(
    "change",
    [
        {"stored": 99},
        {"state": "cancelled"},
        {"read_back": 0},
        {"wrong_records": ("sample 3: digest 0",)},
        {"wrong_bytes": ("sample 3: other bytes",)},
        {"left": ("req_7.safetensors",)},
        {"looks": rising("anonymous")},
        {"looks": rising("files")},
        {"looks": rising("shared")},
        {"looks": rising("descriptors")},
        {"looks": rising("threads")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_criterion_can_be_short(change: dict[str, Any]) -> None:
    assert replace(WELL, **change).short != []
