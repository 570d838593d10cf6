"""Faults on real processes: kills at persisted steps, what proxies and relays do, what fills up. `make chaos` has them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.on_processes import Death, Draw, ProcessSchedules
from tests.chaos.outcome import Outcome
from tests.chaos.processes import chaos_cluster
from tests.chaos.proxy import PROXY_FAULTS
from tests.chaos.relay import DUMP_FAULTS
from tests.fakes.cluster import small_model

UNITS_OF_512 = {"rows_per_shard": 512}
# These wait for a time-out of seconds; `make chaos` has them.
SLOW = ("request hangs", "dump too late")


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSchedules]:
    """One sample a request, so that samples that are asked for again count requests; `make chaos` has requests of several."""
    model = small_model(tmp_path_factory.mktemp("model") / "llama")
    with chaos_cluster(tmp_path_factory.mktemp("cluster"), model, max_batch_tokens=0) as cluster:
        yield ProcessSchedules.begin(cluster)


def assert_right(outcome: Outcome) -> None:
    assert outcome.problems == (), outcome.line


@pytest.mark.parametrize(
    ("step", "when", "call"),
    [
        ("record an answer", "after", 4),
        ("publish a shard object", "after", 1),
        ("commit", "before", 1),
        ("commit", "after", 1),
        ("release a dump", "before", 4),
    ],
)
def test_a_kill_at_a_persisted_step_asks_no_worker_again(schedules: ProcessSchedules, step: str, when: str, call: int) -> None:
    """What was committed, or answered with its dumps whole, is not asked for again: the proxies count the requests."""
    outcome = schedules.run(Draw(0, 0, UNITS_OF_512, death=Death(step, when, call)))
    assert outcome.faults == (f"killed {when} step: {step}",), "the service did not come to that step"
    assert_right(outcome)
    # Of each of the two workers only what was in flight when it died, and the answer before it, if that was still in hand.
    assert outcome.asked_again <= 4
    assert outcome.stored == outcome.samples


def test_what_befalls_requests_is_made_good(schedules: ProcessSchedules) -> None:
    faults = [name for name in PROXY_FAULTS if name not in SLOW and name != "error 400"]
    outcome = schedules.run(Draw(1, 1, UNITS_OF_512, faults=dict(zip(range(2, 30, 3), faults, strict=False))))
    assert sorted(outcome.faults) == sorted(faults)
    assert_right(outcome)
    assert outcome.stored == outcome.samples


def test_what_befalls_dumps_is_refused_and_made_good(schedules: ProcessSchedules) -> None:
    faults = [name for name in DUMP_FAULTS if name not in SLOW]
    outcome = schedules.run(Draw(2, 2, UNITS_OF_512, faults=dict(zip(range(1, 36, 2), faults, strict=False))))
    assert sorted(outcome.faults) == sorted(faults)
    assert_right(outcome)
    assert outcome.stored == outcome.samples


def test_a_sample_that_nobody_can_capture_fails_alone(schedules: ProcessSchedules) -> None:
    outcome = schedules.run(Draw(3, 3, UNITS_OF_512, doomed={3: "error 400", 11: "NaN"}))
    assert_right(outcome)
    assert (outcome.stored, dict(outcome.failed)) == (18, {"request_failed": 1, "bad_values": 1})


@pytest.mark.parametrize(
    "disturbance", ["dump directory full", "store's disk full", "events overflow", "descriptors exhausted", "ledger locked"]
)
def test_what_fills_up_and_is_freed_loses_nothing(schedules: ProcessSchedules, disturbance: str) -> None:
    if not schedules.cluster.may_mount and "full" in disturbance:
        pytest.skip("no file system can be mounted here")
    outcome = schedules.run(Draw(4, 4, UNITS_OF_512, disturbance=disturbance))
    assert_right(outcome)
    assert outcome.stored == outcome.samples
