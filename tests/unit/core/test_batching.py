"""core/batching.py: what a request takes, and how its size follows from the passes of an engine."""

import pytest
from statetap.core.batching import MOST_SAMPLES, MOST_TOKENS, REST_WINDOWS, WANTED_SHARE, WINDOW_REQUESTS, BatchTuner

MILLISECOND = 1_000_000


class Engine:
    """Runs `tokens_per_ms` and idles `gap_ms` after each request, `pass_gap_ms` after each pass; a pass holds `chunk` tokens."""

    def __init__(self, tuner, *, length=100, gap_ms=10.0, tokens_per_ms=20.0, chunk=None, pass_gap_ms=0.0, unit=10**9):
        self.tuner, self.length, self.gap_ms, self.tokens_per_ms = tuner, length, gap_ms, tokens_per_ms
        self.chunk, self.pass_gap_ms, self.unit = chunk, pass_gap_ms, unit
        self.now_ns, self.requests, self.left = MILLISECOND, 0, unit
        self.taken = []

    def request(self, *, stamped=True):
        """One request, and its passes at once; returns its samples' rids."""
        taken = self.tuner.take([self.length] * min(self.left, 10_000))
        self.left -= taken
        self.requests += 1
        self.taken.append(taken)
        rids = [f"{self.requests}-{n}" for n in range(taken)]
        self.tuner.sent(dict.fromkeys(rids, self.length))
        owed = [(rid, self.length) for rid in rids]
        while owed:
            room, of_pass = self.chunk or 10**9, []
            while owed and room:
                rid, rows = owed.pop(0)
                ran = min(rows, room)
                room -= ran
                of_pass.append((rid, ran))
                if ran < rows:
                    owed.insert(0, (rid, rows - ran))
            end_ns = self.now_ns + int(sum(rows for _, rows in of_pass) / self.tokens_per_ms * MILLISECOND)
            for rid, rows in of_pass:
                self.tuner.ran(rid, rows, *((self.now_ns, end_ns) if stamped else (0, 0)))
            self.now_ns = end_ns + int(self.pass_gap_ms * MILLISECOND)
        self.now_ns += int(self.gap_ms * MILLISECOND)
        if self.left == 0:
            self.left = self.unit
            self.tuner.paused()
        return rids

    def run(self, requests=400):
        for _ in range(requests):
            self.request()
        return self


@pytest.mark.parametrize(
    ("tokens", "lengths", "taken"),
    [
        (0, [5, 1, 1], 1),
        (10, [4, 6, 1], 2),
        (10, [4, 7, 1], 1),
        (10, [11, 1], 1),
        (10, [1] * 20, 10),
        (10, [], 0),
        (10**9, [1] * 10_000, MOST_SAMPLES),
    ],
)
def test_a_request_takes_what_fits_in_order_and_one_sample_always(tokens, lengths, taken):
    assert BatchTuner(tokens).take(lengths) == taken


def test_it_begins_with_one_sample():
    assert BatchTuner().take([1, 1]) == 1


@pytest.mark.parametrize("fixed", [0, 1000])
def test_what_is_set_stays(fixed):
    assert Engine(BatchTuner(fixed)).run().tuner.tokens == fixed


@pytest.mark.parametrize("gap_ms", [0.3, 2.0, 10.0, 40.0])
def test_it_grows_until_the_engine_is_busy_and_not_much_further(gap_ms):
    engine = Engine(BatchTuner(), gap_ms=gap_ms).run()
    needed = gap_ms * engine.tokens_per_ms * WANTED_SHARE / (1 - WANTED_SHARE)
    assert engine.tuner.share >= WANTED_SHARE
    assert needed <= engine.tuner.tokens <= 3 * needed


def test_an_engine_that_is_busy_with_one_sample_gets_one():
    assert Engine(BatchTuner(), length=5000, gap_ms=1.0).run().tuner.tokens == 0


def test_the_first_judgement_rests_on_a_window_of_requests():
    engine = Engine(BatchTuner()).run(WINDOW_REQUESTS - 1)
    assert (engine.tuner.tokens, engine.tuner.share) == (0, None)
    engine.run(1)
    assert engine.tuner.share == pytest.approx(8 * 5 / (8 * 5 + 7 * 10))
    assert engine.tuner.tokens > 0


def test_growing_that_does_not_help_is_taken_back_and_rests():
    """The engine idles after each pass, however many prompts stand behind it."""
    engine = Engine(BatchTuner(), length=512, chunk=512, gap_ms=0.0, pass_gap_ms=20.0).run(3 * WINDOW_REQUESTS)
    assert engine.tuner.tokens == 0
    engine.run(WINDOW_REQUESTS * (REST_WINDOWS - 2))
    assert set(engine.taken[2 * WINDOW_REQUESTS + 1 :]) == {1}
    engine.run(3 * WINDOW_REQUESTS)
    assert max(engine.taken[-3 * WINDOW_REQUESTS :]) > 1


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        ({"length": 200, "gap_ms": 400.0}, 80_000),
        ({"length": 50, "gap_ms": 30.0, "tokens_per_ms": 200.0}, 50 * MOST_SAMPLES),
    ],
    ids=["seconds", "samples"],
)
def test_at_the_most_that_a_request_may_hold_it_stays(engine, most):
    """Its engine would idle less with more; how fast it is differs by a few per cent from window to window."""
    engine = Engine(BatchTuner(), **engine)
    speed, sizes = engine.tokens_per_ms, []
    for window in range(8 * REST_WINDOWS):
        engine.tokens_per_ms = speed * (1.0, 1.03, 0.98)[window % 3]
        engine.run(WINDOW_REQUESTS)
        sizes.append(engine.tuner.tokens)
    assert sizes[-1] == pytest.approx(most, rel=0.1)
    assert set(sizes[REST_WINDOWS:]) == {sizes[-1]}


def test_it_never_holds_more_than_may_be_lost():
    engine = Engine(BatchTuner(), gap_ms=5000.0, tokens_per_ms=0.5).run()
    assert 0 < engine.tuner.tokens <= 2000
    engine = Engine(BatchTuner(), length=2000, gap_ms=5000.0, tokens_per_ms=1000.0).run()
    assert 0 < engine.tuner.tokens <= MOST_TOKENS


def test_an_engine_that_became_slow_gets_less():
    engine = Engine(BatchTuner()).run()
    before = engine.tuner.tokens
    engine.tokens_per_ms = 0.1
    assert engine.run(2 * WINDOW_REQUESTS).tuner.tokens <= 400 < before


def test_a_pause_between_requests_is_not_the_engines():
    engine = Engine(BatchTuner(), gap_ms=0.0)
    for _ in range(4 * WINDOW_REQUESTS):
        engine.request()
        engine.request()
        engine.tuner.paused()
        engine.now_ns += 10_000 * MILLISECOND
    assert (engine.tuner.tokens, engine.tuner.share) == (0, pytest.approx(1.0))


def test_units_of_one_request_each_say_nothing():
    engine = Engine(BatchTuner(), unit=1).run()
    assert (engine.tuner.tokens, engine.tuner.share) == (0, None)


def test_it_grows_no_further_than_units_fill():
    engine = Engine(BatchTuner(), gap_ms=1000.0, unit=30).run()
    assert engine.tuner.tokens <= MOST_TOKENS
    assert max(engine.taken) <= 30


def test_without_stamps_it_stays_as_it_is():
    tuner = BatchTuner()
    engine = Engine(tuner)
    for _ in range(10 * WINDOW_REQUESTS):
        engine.request(stamped=False)
    assert tuner.tokens == 0


def test_rows_that_never_come_hold_nothing_up_for_ever():
    tuner = BatchTuner()
    tuner.sent({"never": 100})
    assert Engine(tuner).run().tuner.share is not None


def test_a_lost_request_of_several_halves_and_one_alone_does_not():
    tuner = BatchTuner()
    engine = Engine(tuner).run()
    before = tuner.tokens
    engine.length = before // 4
    rids = engine.request()
    assert len(rids) == 4
    tuner.lost(rids[2])
    assert tuner.tokens == 2 * engine.length
    for rid in rids:
        tuner.lost(rid)  # of the same request, for want of room
    assert tuner.tokens == 2 * engine.length
    engine.length = before
    tuner.lost(engine.request()[0])
    assert tuner.tokens == 2 * (before // 4)
    engine.length = 100
    engine.run(2 * WINDOW_REQUESTS)
    assert tuner.tokens == 2 * (before // 4)


def test_a_request_that_outlasts_a_judgement_may_still_be_lost():
    tuner = BatchTuner()
    engine = Engine(tuner)
    tuner.tokens = 1000
    for number in range(WINDOW_REQUESTS):
        tuner.sent({f"{number}-{n}": 100 for n in range(10)})
        if number:
            begin = number * 60 * MILLISECOND
            for n in range(10):
                tuner.ran(f"{number - 1}-{n}", 100, begin, begin + 50 * MILLISECOND)
    tuner.sent({f"last-{n}": 100 for n in range(10)})
    for n in range(10):
        tuner.ran(f"{WINDOW_REQUESTS - 1}-{n}", 100, 480 * MILLISECOND, 530 * MILLISECOND)
    assert tuner.share is not None
    tuner.lost("last-3")
    assert tuner.tokens == 500
    assert engine.taken == []


def test_what_a_loss_may_cost_is_counted_in_time_not_in_stamps():
    """Rows of one pass may be stamped one after the other, all from its beginning on."""
    tuner = BatchTuner()
    tuner.tokens = 4000
    for number in range(WINDOW_REQUESTS):
        rids = [f"{number}-{n}" for n in range(40)]
        tuner.sent(dict.fromkeys(rids, 100))
        begin = (1 + number * 1001) * MILLISECOND
        for n, rid in enumerate(rids):
            tuner.ran(rid, 100, begin, begin + (n + 1) * 25 * MILLISECOND)
    assert tuner.share > WANTED_SHARE
    assert tuner.tokens == 4000


def test_passes_that_overlap_count_once():
    tuner = BatchTuner()
    for number in range(WINDOW_REQUESTS):
        tuner.sent({str(number): 10})
        begin = (1 + number * 10) * MILLISECOND
        tuner.ran(str(number), 5, begin, begin + 6 * MILLISECOND)
        tuner.ran(str(number), 5, begin + 2 * MILLISECOND, begin + 8 * MILLISECOND)
    assert tuner.share == pytest.approx(8 * 8 / 78)
