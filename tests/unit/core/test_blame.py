"""core/blame.py: who is at fault when attempts fail, the sample or the worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.core.blame import Blame, Failure

UNIT = ("j", 0)
LIMIT = 3


class Court:
    """A `Blame`, with attempts named by themselves."""

    def __init__(self, limit=LIMIT):
        self.blame = Blame(limit)
        self.asked = 0

    def ask(self, worker, sample, unit=UNIT):
        self.asked += 1
        self.blame.asked(unit, str(self.asked), sample, worker)
        return str(self.asked)

    def fails(self, worker, *samples, unit=UNIT):
        """Ask for each and let it fail at once; what the last one brought, as sample numbers."""
        for sample in samples:
            blamed = self.blame.failed(unit, self.ask(worker, sample, unit), "broken")
        return [failure.sample for failure in blamed]

    def captures(self, worker, sample, unit=UNIT):
        self.blame.captured(unit, self.ask(worker, sample, unit))


@pytest.fixture
def court():
    return Court()


def test_failures_in_a_row_at_several_samples_are_the_workers(court):
    assert court.fails("a", 0, 1) == []
    assert court.blame.failed(UNIT, court.ask("a", 0), "NaN") == (
        Failure(UNIT, 0, "broken"),
        Failure(UNIT, 1, "broken"),
        Failure(UNIT, 0, "NaN"),
    )


def test_one_bad_sample_alone_convicts_nobody(court):
    assert court.fails("a", *[0] * 20) == []


def test_a_capture_ends_a_row(court):
    court.fails("a", 0, 1)
    court.captures("a", 2)
    assert court.fails("a", 3, 4) == []
    assert court.fails("a", 5) == [3, 4, 5]


def test_a_sample_that_failed_at_two_workers_leaves_both_rows(court):
    court.fails("a", 0, 1)
    court.fails("b", 2, 3)
    court.fails("b", 0)
    assert court.fails("b", 2) == [2, 3, 2], "sample 0 is not among them"
    assert court.fails("a", 4) == []
    assert court.fails("a", 5) == [1, 4, 5]


def test_a_sample_that_fails_again_after_another_was_captured_there_is_at_fault(court):
    court.fails("a", 0, 1)
    court.captures("a", 2)
    assert court.fails("a", 0, 1, 0, 1) == []
    assert court.fails("a", 3, 4) == []


def test_what_failed_once_and_was_captured_elsewhere_stays_the_workers(court):
    court.fails("a", 0)
    court.captures("b", 0)
    assert court.fails("a", 1, 2) == [0, 1, 2]


def test_each_further_failure_of_a_convicted_worker_is_its_own(court):
    late = [court.ask("a", sample) for sample in (7, 8)]
    court.fails("a", 0, 1, 2)
    assert [court.blame.failed(UNIT, rid, "late") for rid in late] == [(Failure(UNIT, s, "late"),) for s in (7, 8)]
    court.blame.acquit("a")
    assert court.fails("a", 9) == []


def test_a_failure_that_comes_late_says_nothing_after_a_later_attempt_was_captured(court):
    overdue = [court.ask("a", sample) for sample in range(5)]
    court.captures("a", 5)
    assert [court.blame.failed(UNIT, rid, "overdue") for rid in overdue] == [()] * 5
    assert court.fails("a", 6, 7) == []


def test_an_early_attempt_that_is_captured_late_does_not_end_the_row_after_it(court):
    early = court.ask("a", 0)
    court.fails("a", 1, 2)
    court.blame.captured(UNIT, early)
    assert court.fails("a", 3) == [1, 2, 3]


def test_what_another_boot_was_asked_for_is_not_blamed_on_this_one(court):
    old = [court.ask("a", sample) for sample in range(5)]
    court.fails("a", 5, 6)
    court.blame.forget_worker("a")
    assert [court.blame.failed(UNIT, rid, "gone") for rid in old] == [()] * 5
    assert court.fails("a", 7) == []


def test_an_excused_attempt_counts_for_nothing(court):
    court.fails("a", 0, 1)
    rid = court.ask("a", 2)
    court.blame.excused(UNIT, rid)
    assert court.blame.failed(UNIT, rid, "once more") == ()


def test_rows_go_on_from_unit_to_unit(court):
    for unit in range(2):
        assert court.fails("a", 0, unit=("j", unit)) == []
        court.blame.forget_unit(("j", unit))
    assert court.fails("a", 0, unit=("k", 0)) == [0, 0, 0]


workers, samples = st.sampled_from("abc"), st.integers(0, 5)
steps = st.lists(st.tuples(workers, samples, st.sampled_from(["fails", "is captured", "lingers"])), max_size=60)


@given(steps)
def test_any_story_blames_workers_only_for_what_no_other_evidence_explains(story):
    """A worker is convicted of the failures since its last capture alone, at two samples, none of which failed elsewhere."""
    court, since, failed_at, convicted, captured = Court(), {w: [] for w in "abc"}, {}, set(), set()
    for worker, sample, outcome in story:
        if sample in captured:
            continue  # it is not asked for again
        rid = court.ask(worker, sample)
        if outcome == "is captured":
            court.blame.captured(UNIT, rid)
            since[worker].clear()
            captured.add(sample)
        elif outcome == "fails":
            blamed = court.blame.failed(UNIT, rid, "broken")
            since[worker].append(sample)
            failed_at.setdefault(sample, set()).add(worker)
            for failure in blamed:
                assert failed_at.get(failure.sample, set()) <= {worker}
            if blamed and worker not in convicted:
                convicted.add(worker)
                assert len(blamed) >= LIMIT
                assert len({failure.sample for failure in blamed}) > 1
                assert len(blamed) <= len(since[worker])


def fail_together(court, worker, *samples):
    """One request for these samples, which fails; what it convicts the worker of, as sample numbers."""
    rids = []
    for number, sample in enumerate(samples):
        court.asked += 1
        rids.append(str(court.asked))
        court.blame.asked(UNIT, rids[-1], sample, worker, in_company=number > 0)
    return [failure.sample for rid in rids for failure in court.blame.failed(UNIT, rid, "broken", costs=False)]


def test_a_request_of_many_samples_is_one_failure(court):
    assert fail_together(court, "a", *range(20)) == []
    assert fail_together(court, "a", 20, 21) == []
    assert fail_together(court, "a", 22, 23) == [*range(23), 23]


def test_a_lost_request_says_nothing_of_its_samples_at_the_next_worker(court):
    fail_together(court, "a", 0, 1, 2)
    assert court.fails("b", 0, 1) == []
    assert court.fails("b", 2) == [0, 1, 2]


def test_a_capture_clears_the_worker_of_what_failed_in_the_same_request(court):
    court.fails("a", 0, 1)
    for number, sample in enumerate((2, 3, 4)):
        court.blame.asked(UNIT, f"r{sample}", sample, "a", in_company=number > 0)
    assert court.blame.failed(UNIT, "r2", "broken") != ()
    court = Court()
    court.fails("a", 0, 1)
    for number, sample in enumerate((2, 3, 4)):
        court.blame.asked(UNIT, f"r{sample}", sample, "a", in_company=number > 0)
    court.blame.captured(UNIT, "r3")
    assert court.blame.failed(UNIT, "r2", "broken") == ()
    assert court.blame.failed(UNIT, "r4", "broken") == ()
    assert court.fails("a", 5, 6) == []
