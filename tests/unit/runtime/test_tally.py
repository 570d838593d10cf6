"""Rates over the last minute of work; each worker's share and the norms, which survive a restart."""

from statetap.core.norms import NormSummary, RowKind
from statetap.runtime.tally import MOST_LOST_TOLD, CommitReport, JobTally, LostAttempt
from statetap.runtime.views import WorkerTally


def report(tokens=0, nbytes=0, **workers):
    return CommitReport(stored=1, failed=0, tokens=tokens, nbytes=nbytes, workers=workers)


def test_there_is_no_rate_before_the_first_commit():
    tally = JobTally()
    assert tally.rates(5.0) == (0.0, 0.0)
    tally.began(0.0)
    assert tally.rates(5.0) == (0.0, 0.0)


def test_a_young_job_is_measured_since_it_began():
    tally = JobTally()
    tally.began(100.0)
    tally.committed(report(30, 300), at=110.0)
    assert tally.rates(120.0) == (1.5, 15.0)


def test_only_the_last_minute_counts():
    tally = JobTally()
    tally.began(0.0)
    tally.committed(report(1000, 10_000), at=30.0)
    tally.committed(report(60, 600), at=80.0)
    assert tally.rates(100.0) == (1.0, 10.0)
    assert tally.rates(200.0) == (0.0, 0.0)


def test_a_pause_is_not_work():
    tally = JobTally()
    tally.began(0.0)
    tally.committed(report(60, 600), at=10.0)
    tally.began(50.0)
    tally.committed(report(20, 200), at=55.0)
    assert tally.rates(60.0) == (2.0, 20.0)


def test_attempts_count_when_they_are_made_and_all_is_replayed_from_the_events():
    tally, again = JobTally(), JobTally()
    for worker, what in (("a", "attempts"), ("a", "lost"), ("b", "attempts")):
        tally.attempted(worker, what)
    commit = report(a=WorkerTally(attempts=1, lost=1), b=WorkerTally(attempts=1, stored=1))
    tally.committed(commit, at=0.0)
    again.replay(commit.as_event(7))
    assert tally.workers == again.workers == {"a": WorkerTally(attempts=1, lost=1), "b": WorkerTally(attempts=1, stored=1)}
    assert commit.as_line(7) == {
        "unit": 7,
        "stored": 1,
        "failed": 0,
        "tokens": 0,
        "bytes": 0,
        "workers": {"a": {"stored": 0, "attempts": 1, "lost": 1}, "b": {"stored": 1, "attempts": 1, "lost": 0}},
        "lost": [],
    }


def test_norms_are_replayed_from_the_events_and_older_events_have_none():
    tally, again = JobTally(), JobTally()
    norms = {"last_hidden_states": {"first": [[2, 1.0, 3.0, 4.0]]}}
    commit = CommitReport(2, 0, 10, 100, {}, norms=norms)
    tally.committed(commit, at=0.0)
    again.replay(commit.as_line(6))
    again.replay(commit.as_event(7))
    told = [("last_hidden_states", 0, RowKind.FIRST, NormSummary(2, 1.0, 3.0, 4.0))]
    assert list(tally.norms.stored.rows()) == list(again.norms.stored.rows()) == told


def test_an_event_tells_why_attempts_were_lost_but_not_of_thousands():
    attempts = tuple(LostAttempt(f"st-j-0-{sample}-1-1", "a", "lost_by_publisher: no space") for sample in range(1000))
    told = CommitReport(0, 1000, 0, 0, {}, attempts).as_event(0)["lost"]
    assert told[0] == {"rid": "st-j-0-0-1-1", "worker": "a", "reason": "lost_by_publisher: no space"}
    assert len(told) == MOST_LOST_TOLD
