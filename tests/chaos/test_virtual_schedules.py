"""A few seeded schedules of faults in virtual time; `make chaos` runs hundreds."""

import pytest

from tests.chaos.virtual import run_virtual

SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_ends_stored_or_failed_for_a_reason(seed: int) -> None:
    outcome = run_virtual(seed)
    assert outcome.problems == (), outcome.line
