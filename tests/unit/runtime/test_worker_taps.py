"""runtime/worker_taps.py: the taps of one boot are one worker, once they are all there and say the same."""

from dataclasses import replace

import pytest
from statetap.core.spec import CaptureSpec, Final
from statetap.ports import TapRefused
from statetap.runtime.worker_taps import NO_TAP, NotUsable, WorkerTaps

from tests.fakes.harness import CAPTURE, MODEL, TAP


def rank(number, of, boot="boot1", **changes):
    return replace(TAP, tap=f"{boot}-{number}", boot=boot, dp_rank=number, dp_size=of, **changes)


def taps(*seen):
    all_of_them = WorkerTaps()
    for tap in seen:
        all_of_them.saw(tap)
    return all_of_them


def fault(*seen):
    together = taps(*seen).together()
    assert isinstance(together, NotUsable)
    return together.reason


def test_a_lone_tap_is_the_worker():
    one = taps(TAP)
    assert (one.boot, one.together()) == ("boot1", TAP)


def test_without_a_living_tap_there_is_nothing():
    assert taps().boot is None
    assert fault() == NO_TAP
    assert fault(TAP, replace(TAP, alive=False)) == NO_TAP


def test_all_ranks_are_one_worker_with_the_smallest_budget():
    together = taps(rank(1, 3, budget_bytes=70), rank(2, 3, budget_bytes=50), rank(0, 3, budget_bytes=60)).together()
    assert together == replace(rank(0, 3, budget_bytes=50), tap="boot1")


@pytest.mark.parametrize(("there", "missing"), [([0], "1, 2"), ([2], "0, 1"), ([0, 2], "1")])
def test_ranks_that_are_missing_are_named(there, missing):
    reason = fault(*(rank(number, 3) for number in there))
    assert reason.startswith(f"of 3 data-parallel ranks, no tap has announced itself for {missing}: all must publish below")


def test_a_rank_whose_process_ended_is_missing():
    assert "announced itself for 1:" in fault(rank(0, 2), rank(1, 2), rank(1, 2, alive=False))


def test_a_rank_beyond_the_size_is_refused():
    assert fault(rank(2, 2)) == "tap boot1-2 is of rank 2, but says that there are 2; start the server anew"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"model": replace(MODEL, model_fingerprint="other")},
            "model_fingerprint: rank 0 says 'fingerprint', rank 1 says 'other'",
        ),
        ({"model": replace(MODEL, model_path="org/other")}, "model_path: rank 0 says 'org/model', rank 1 says 'org/other'"),
        ({"model": replace(MODEL, num_layers=9)}, "num_layers: rank 0 says 8, rank 1 says 9"),
        ({"model": replace(MODEL, hidden_size=5)}, "hidden_size: rank 0 says 4, rank 1 says 5"),
        ({"model": replace(MODEL, vocab_size=9)}, "vocab_size: rank 0 says 1000, rank 1 says 9"),
        ({"model": replace(MODEL, dtype="float16")}, "dtype: rank 0 says 'float32', rank 1 says 'float16'"),
        ({"capture": CaptureSpec((1, 4), CAPTURE.final)}, "aux_layer_ids: rank 0 says [1, 3], rank 1 says [1, 4]"),
        ({"capture": CaptureSpec((1, 3), Final.PRE_NORM)}, "final: rank 0 says 'post_norm', rank 1 says 'pre_norm'"),
        ({"chunked_prefill_size": 64}, "chunked_prefill_size: rank 0 says None, rank 1 says 64"),
        ({"context_length": 64}, "context_length: rank 0 says None, rank 1 says 64"),
        ({"dp_size": 3}, "dp_size: rank 0 says 2, rank 1 says 3"),
    ],
)
def test_ranks_that_say_different_things_are_refused(changes, what):
    reason = fault(replace(rank(1, 2), **changes), rank(0, 2))
    assert reason == f"the taps of boot boot1 differ in {what}; start all ranks with one configuration"


def test_only_the_newest_boot_counts():
    both = taps(rank(0, 2), rank(1, 2), rank(0, 2, "boot2"))
    assert both.boot == "boot2"
    assert isinstance(both.together(), NotUsable)
    both.saw(rank(1, 2, "boot2"))
    assert both.together().tap == "boot2"


def test_the_newest_is_the_one_that_was_announced_last_and_not_the_one_that_was_seen_last():
    newer, older = rank(0, 1, "boot1", announced_ns=20), rank(0, 1, "boot2", announced_ns=10)
    for order in ((newer, older), (older, newer)):
        assert taps(*order).together() == newer


def test_when_the_newest_boot_ends_an_older_one_that_lives_counts_again():
    both = taps(TAP, rank(0, 1, "boot2"))
    both.saw(rank(0, 1, "boot2", alive=False))
    assert both.together() == TAP


def test_a_tap_that_refuses_makes_its_boot_unusable_whoever_else_is_there():
    refused = TapRefused("boot1-1", "boot1", "the model is unknown", alive=True)
    reason = "tap boot1-1 publishes nothing: the model is unknown"
    assert fault(rank(0, 2), refused) == fault(refused) == fault(rank(0, 2), rank(1, 2), refused) == reason
    again = taps(rank(0, 2), rank(1, 2), refused, rank(0, 1, "boot2"))
    assert again.together() == rank(0, 1, "boot2")
    ended = taps(rank(0, 2), rank(1, 2), refused, replace(refused, alive=False))
    assert ended.together().tap == "boot1"
