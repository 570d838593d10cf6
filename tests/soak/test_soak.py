"""A short soak: too short to show a slow leak of memory, long enough for what is not closed, not removed or not right."""

from __future__ import annotations

from pathlib import Path

from tests.soak.soak import Plan, soaking

# With that many faults, one of two thousand samples would meet one at each of four attempts.
SHORT = Plan(samples=200, distinct=60, jobs=4, workers=3, faults=0.15, kills=1, look_seconds=0.2, attempts=8)
# A service that has just started still fills its caches, and seconds of work are never alike. What it keeps open shows when it
# is idle again.
TOO_EARLY = (
    "service: memory of its own (RssAnon + RssFile)",
    "service: resident memory (with mapped dumps)",
    "service: descriptors",
    "service: threads",
    "service: tasks",
)


def test_a_service_under_a_trickle_of_faults_keeps_nothing_and_stores_nothing_wrong(tmp_path: Path) -> None:
    with soaking(SHORT, tmp_path) as soak:
        soaked = soak.run()
    assert [criterion for criterion in soaked.short if criterion.name not in TOO_EARLY] == []
    assert (soaked.kills, soaked.stored) == (1, 200)
    assert soaked.faults.total() >= 10
