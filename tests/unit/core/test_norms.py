"""What a job has seen of norms, which captures are out of all proportion, and what is told of them."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.norms import (
    ENOUGH_CAPTURES,
    MOST_SAMPLED_ROWS,
    ArrayNorms,
    JobNorms,
    NormSummary,
    NormTable,
    RowKind,
    UnitNorms,
    sampled_rows,
)

AUX, LAST = "aux_hidden_states", "last_hidden_states"
NORMS = st.floats(min_value=1e-30, max_value=1e30)


def capture(*rows, first=(100.0, 200.0, 300.0), last=5.0):
    """Three layers and a final state, in row 0 and, from row 17 on, in `rows`; by default in one, of tens."""
    later = rows or ((10.0, 20.0, 30.0),)
    numbers = (0, *range(17, 17 + len(later)))
    return (
        ArrayNorms(AUX, numbers, (first, *later)),
        ArrayNorms(LAST, numbers, tuple((last,) for _ in numbers)),
    )


def seasoned(captures=ENOUGH_CAPTURES, **changes):
    job = JobNorms()
    for sample in range(captures):
        job.accepted(sample, capture(**changes))
    return job


def bad_values(detail):
    return Refusal(RefusalReason.BAD_VALUES, detail)


@pytest.mark.parametrize(
    ("rows", "sampled"),
    [(1, (0,)), (2, (0, 1)), (3, (0, 2)), (255, (0, 254)), (256, (0, 127, 255)), (512, (0, 170, 340, 511))],
)
def test_the_first_and_the_last_row_are_sampled_and_some_between_them(rows, sampled):
    assert sampled_rows(rows) == sampled


@given(st.integers(min_value=1, max_value=1 << 20))
def test_sampled_rows_are_spread_evenly(rows):
    sampled = sampled_rows(rows)
    steps = [after - before for before, after in pairwise(sampled)]
    assert (sampled[0], sampled[-1]) == (0, rows - 1)
    assert len(sampled) <= MOST_SAMPLED_ROWS
    assert not steps or (min(steps) > 0 and max(steps) - min(steps) <= 1)


def test_norms_out_of_all_proportion_are_refused():
    told = "aux_hidden_states: row 18 has a norm of 3.1e+04 in layer 2 of 3, the job has seen 20 to 20"
    assert seasoned().refusal(99, capture((10.0, 20.0, 30.0), (10.0, 31000.0, 30.0))) == bad_values(told)


@pytest.mark.parametrize(("norm", "refused"), [(2.5, False), (2.49, True), (160.0, False), (161.0, True)])
def test_a_factor_of_eight_passes(norm, refused):
    assert (seasoned().refusal(99, capture((10.0, norm, 30.0))) is not None) is refused


def test_each_layer_and_each_array_is_held_against_its_own():
    job = seasoned(last=5000.0)
    assert job.refusal(99, capture(last=5000.0)) is None
    told = "last_hidden_states: row 0 has a norm of 5, the job has seen 5e+03 to 5e+03 in first rows"
    assert job.refusal(99, capture()) == bad_values(told)


def test_first_rows_are_held_against_first_rows():
    job = seasoned(first=(1e5, 2e5, 3e5))
    assert job.refusal(99, capture(first=(1e5, 2e5, 3e5))) is None
    told = "aux_hidden_states: row 0 has a norm of 10 in layer 1 of 3, the job has seen 1e+05 to 1e+05 in first rows"
    assert job.refusal(98, capture(first=(10.0, 20.0, 30.0))) == bad_values(told)
    told = "aux_hidden_states: row 17 has a norm of 1e+05 in layer 1 of 3, the job has seen 10 to 10"
    assert job.refusal(97, capture((1e5, 2e5, 3e5), first=(1e5, 2e5, 3e5))) == bad_values(told)


def test_before_enough_captures_everything_passes():
    odd = capture((1e5, 1e5, 1e5))
    assert seasoned(ENOUGH_CAPTURES - 1).refusal(99, odd) is None
    assert seasoned(ENOUGH_CAPTURES).refusal(99, odd) is not None


def test_many_rows_of_few_captures_are_not_enough():
    job = JobNorms()
    job.accepted(0, capture(*[(10.0, 20.0, 30.0)] * 200))
    assert job.refusal(99, capture((1e5, 1e5, 1e5))) is None


def test_many_captures_of_one_row_say_nothing_of_later_rows():
    job = JobNorms()
    for sample in range(200):
        job.accepted(sample, (ArrayNorms(LAST, (0,), ((5.0,),)),))
    assert job.refusal(99, (ArrayNorms(LAST, (0, 1), ((5.0,), (5e5,))),)) is None
    job.accepted(99, (ArrayNorms(LAST, (0, 1), ((5.0,), (5e5,))),))
    assert job.refusal(98, (ArrayNorms(LAST, (0, 1), ((5.0,), (5.0,))),)) is None


def test_what_is_refused_does_not_widen_what_was_seen():
    job = seasoned()
    for sample in range(100, 300):
        assert job.refusal(sample, capture((10.0, 31000.0, 30.0))) is not None
    assert list(job.stored.rows()) == []


@pytest.mark.parametrize("again", [31000.0, 30000.0])
def test_the_same_norms_again_are_what_the_model_computes(again):
    job, odd = seasoned(), capture((10.0, 31000.0, 30.0))
    assert job.refusal(99, odd) is not None
    assert job.refusal(98, odd) is not None, "another sample's"
    assert job.refusal(99, capture((10.0, again, 30.0))) is None
    job.accepted(99, odd)
    assert job.refusal(97, odd) is None, "the job has seen it now"


@pytest.mark.parametrize("other", [capture((10.0, 29000.0, 30.0)), capture((10.0, 31000.0, 30.0), last=5.5)])
def test_other_norms_are_no_confirmation(other):
    job = seasoned()
    assert job.refusal(99, capture((10.0, 31000.0, 30.0))) is not None
    assert job.refusal(99, other) is not None


def test_any_earlier_attempt_may_confirm():
    job, odd, foreign = seasoned(), capture((10.0, 31000.0, 30.0)), capture((1e9, 20.0, 1e-9))
    assert [job.refusal(99, c) is None for c in (odd, foreign, odd)] == [False, False, True]


def test_what_is_stored_is_told_and_survives_as_data():
    job, unit_norms = JobNorms(), []
    for unit in range(2):
        unit_norms.append(UnitNorms(job))
        for sample in range(40):
            rid = f"st-j-{unit}-{sample}-1-1"
            rows = ((8.0 + unit, 20.0, 30.0), (12.0, 1 / 3, 30.0))
            assert unit_norms[unit].refusal(rid, capture(*rows)) is None
            unit_norms[unit].accepted(rid)
    assert list(job.stored.rows()) == [], "nothing is committed yet"
    assert job.refusal(99, capture((31000.0, 20.0, 30.0))) is not None, "but 80 captures were seen"

    data = [json.loads(json.dumps(unit.as_data())) for unit in unit_norms]
    assert data[1][AUX]["later"] == [[80, 9.0, 12.0, 840.0], [80, 0.333333, 20.0, 813.333], [80, 30.0, 30.0, 2400.0]]
    again = JobNorms()
    for committed in data:
        job.committed(committed)
        again.replay(committed)
    told = list(job.stored.rows())
    assert told == list(again.stored.rows())
    assert [(array, slot, kind) for array, slot, kind, _ in told] == [
        *((AUX, slot, kind) for slot in range(3) for kind in (RowKind.FIRST, RowKind.LATER)),
        *((LAST, 0, kind) for kind in (RowKind.FIRST, RowKind.LATER)),
    ]
    assert told[1][3] == NormSummary(160, 8.0, 12.0, 1640.0)
    assert told[1][3].mean == 10.25
    assert again.refusal(99, capture((31000.0, 20.0, 30.0))) == bad_values(
        "aux_hidden_states: row 17 has a norm of 3.1e+04 in layer 1 of 3, the job has seen 8 to 12"
    )


def test_a_refused_attempt_is_not_among_what_is_stored():
    unit = UnitNorms(seasoned())
    assert unit.refusal("st-j-0-99-1-1", capture((10.0, 31000.0, 30.0))) is not None
    assert unit.refusal("st-j-0-99-2-1", capture()) is None
    unit.accepted("st-j-0-99-2-1")
    assert unit.as_data()[AUX]["later"][1] == [1, 20.0, 20.0, 20.0]


@given(st.lists(st.lists(NORMS, min_size=1, max_size=5), min_size=1, max_size=8), st.data())
def test_the_order_of_units_does_not_matter(units, data):
    shuffled = data.draw(st.permutations(units))
    tables = []
    for order in (units, shuffled):
        table = NormTable()
        for unit in order:
            one = NormTable()
            one.add_capture([ArrayNorms(LAST, tuple(range(len(unit))), tuple((norm,) for norm in unit))])
            table.add_data(one.as_data())
        tables.append(list(table.rows()))
    for (*place, told), (*also, other) in zip(*tables, strict=True):
        assert place == also
        assert (told.count, told.least, told.largest) == (other.count, other.least, other.largest)
        assert told.total == pytest.approx(other.total)
        assert told.least * (1 - 1e-5) <= told.mean <= told.largest * (1 + 1e-5)
