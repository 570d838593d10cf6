"""The batch tuner against engines of every kind: what it may never do, and what it must reach."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from statetap.core.batching import MOST_SAMPLES, MOST_SECONDS, MOST_TOKENS, WANTED_SHARE, BatchTuner

LENGTHS = st.lists(st.integers(1, 5000), max_size=40)


@given(fixed=st.integers(0, 20_000), lengths=LENGTHS)
def test_what_is_taken_is_a_beginning_that_fits_and_cannot_be_longer(fixed, lengths):
    taken = BatchTuner(fixed).take(lengths)
    assert min(len(lengths), 1) <= taken <= min(len(lengths), MOST_SAMPLES)
    if taken > 1:
        assert sum(lengths[:taken]) <= fixed
    if taken < len(lengths):
        assert sum(lengths[: taken + 1]) > fixed


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.lists(st.integers(1, 300), min_size=1, max_size=5)),
        st.tuples(st.just("pass"), st.integers(1, 400), st.integers(0, 40)),
        st.tuples(st.just("gap"), st.integers(0, 10**9)),
        st.tuples(st.just("lost"), st.integers(0, 5)),
        st.tuples(st.just("pause")),
    ),
    max_size=200,
)


@given(events=EVENTS, fixed=st.one_of(st.none(), st.integers(0, 1000)))
def test_whatever_happens_it_stays_within_its_limits(events, fixed):
    """Passes late, missing, doubled, without stamps; losses of what is long forgotten."""
    tuner, now, rids, known = BatchTuner(fixed), 1, [], {}
    for number, event in enumerate(events):
        match event:
            case ("request", lengths):
                rids = [f"{number}-{n}" for n in range(len(lengths))]
                known |= dict(zip(rids, lengths, strict=True))
                tuner.sent(dict(zip(rids, lengths, strict=True)))
            case ("pass", rows, which) if known:
                tuner.ran(list(known)[-1 - which % len(known)], rows, now, now + rows * 1000 * (which % 3))
                now += rows * 1000
            case ("gap", ns):
                now += ns
            case ("lost", which) if known:
                tuner.lost(list(known)[-1 - which % len(known)])
            case ("pause",):
                tuner.paused()
        assert tuner.tokens == fixed if fixed is not None else 0 <= tuner.tokens <= MOST_TOKENS
        assert tuner.share is None or 0 < tuner.share <= 1


@settings(deadline=None, max_examples=60)
@given(
    gap_ms=st.floats(0.05, 50),
    tokens_per_ms=st.floats(0.5, 200),
    length=st.integers(2, 4000),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 1000),
)
def test_an_engine_with_gaps_between_requests_becomes_busy_if_a_loss_may_cost_that_much(
    gap_ms, tokens_per_ms, length, noise, seed
):
    tuner, now, random = BatchTuner(), 1.0, Random(seed)
    for number in range(600):
        rids = [f"{number}-{n}" for n in range(tuner.take([length] * MOST_SAMPLES))]
        tuner.sent(dict.fromkeys(rids, length))
        begun = now
        now += len(rids) * length / tokens_per_ms
        for rid in rids:
            tuner.ran(rid, length, int(begun * 1e6), int(now * 1e6))
        now += gap_ms * random.uniform(1 - noise, 1 + noise)
    needed = gap_ms * WANTED_SHARE / (1 - WANTED_SHARE)
    allowed = min(MOST_SECONDS * 1000, MOST_TOKENS / tokens_per_ms, MOST_SAMPLES * length / tokens_per_ms)
    assert tuner.tokens <= MOST_TOKENS
    if needed * 1.5 + 2 * length / tokens_per_ms < allowed:
        assert tuner.share >= WANTED_SHARE - 0.02
    if length / tokens_per_ms > needed * 1.3:
        assert tuner.tokens == 0
