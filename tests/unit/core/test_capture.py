"""core/capture.py: every rule of the evidence, by tokens and by count: the exact is accepted, all else refused or awaited."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from statetap.core.capture import (
    Complete,
    Expected,
    Incomplete,
    NeedDigests,
    Refusal,
    assemble_by_count,
    assemble_by_tokens,
    chunk_pattern,
    require_named,
)

from tests.unit.core.dump_facts import ARRAYS, CAPTURE, FINGERPRINT, expected, plain_dump, plugin_dump, tensors, token_bytes

CHUNK = 8


def pieces(rows, chunk, **other):
    """The dumps of a prompt that is split after `chunk` tokens."""
    edges = [*range(0, rows, chunk), rows]
    return [plugin_dump(f"d{start}", start, stop, **other) for start, stop in pairwise(edges)]


def by_tokens(rows, dumps, digests=None):
    return assemble_by_tokens(expected(rows), dumps, digests or {})


def refused(verdict):
    assert isinstance(verdict, Refusal), verdict
    return verdict.reason.value


# --- by tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_pieces_that_tile_the_prompt_are_its_capture_in_row_order(rows):
    dumps = pieces(rows, CHUNK, prompt=rows)
    Random(rows).shuffle(dumps)
    verdict = by_tokens(rows, dumps)
    assert verdict == Complete(tuple(f"d{start}" for start in range(0, rows, CHUNK)))


@pytest.mark.parametrize("rows", [1, 8, 9, 24, 25])
@pytest.mark.parametrize("lost", [0, 1, -1])
def test_a_missing_piece_is_named(rows, lost):
    dumps = pieces(rows, CHUNK)
    if lost >= len(dumps):
        lost = -1
    piece = dumps.pop(lost)
    assert by_tokens(rows, dumps) == Incomplete(piece.prefix_len, piece.prefix_len + piece.rows)


@pytest.mark.parametrize(
    ("dumps", "verdict"),
    [
        ([], Incomplete(0, 10)),
        ([plugin_dump("a", 0, 9)], Incomplete(9, 10)),
        ([plugin_dump("a", 1, 10)], Incomplete(0, 1)),
        ([plugin_dump("a", 0, 3), plugin_dump("b", 4, 10)], Incomplete(3, 4)),
        ([plugin_dump("a", 2, 4), plugin_dump("b", 6, 8)], Incomplete(0, 2)),
    ],
)
def test_the_first_gap_is_what_is_missing(dumps, verdict):
    assert by_tokens(10, dumps) == verdict


@pytest.mark.parametrize(
    ("dump", "reason"),
    [
        (plugin_dump("a", 0, 10, ids=[*range(100, 109), 7]), "wrong_tokens"),
        (plugin_dump("a", 0, 10, ids=range(99, 109)), "wrong_tokens"),
        (plugin_dump("a", 0, 10, ids=[]), "wrong_tokens"),
        (plugin_dump("a", 4, 8, ids=range(100, 104)), "wrong_tokens"),
        (plugin_dump("a", 0, 10, prompt=11), "wrong_prompt_length"),
        (plugin_dump("a", 0, 10, prompt=9), "wrong_prompt_length"),
        (plugin_dump("a", 10, 11, prompt=11), "wrong_prompt_length"),
        (plugin_dump("a", 0, 10, tensors=()), "wrong_tensors"),
        (plugin_dump("a", 0, 10, tensors=tensors(10)[:1]), "wrong_tensors"),
        (plugin_dump("a", 0, 10, tensors=tensors(9)), "wrong_tensors"),
        (
            plugin_dump("a", 0, 10, tensors=(*tensors(10), ("last_hidden_states_prenorm", "bfloat16", (10, 8)))),
            "wrong_tensors",
        ),
        (
            plugin_dump("a", 0, 10, tensors=(tensors(10)[0], ("last_hidden_states", "float32", (10, 8)))),
            "wrong_tensors",
        ),
        (
            plugin_dump("a", 0, 10, tensors=(("aux_hidden_states", "bfloat16", (10, 2, 8)), tensors(10)[1])),
            "wrong_tensors",
        ),
    ],
)
def test_a_dump_that_contradicts_the_sample_is_refused(dump, reason):
    assert refused(by_tokens(10, [dump])) == reason


def test_a_refusal_says_what_there_is_and_what_is_needed():
    verdict = by_tokens(10, [plugin_dump("w/req_1", 0, 10, tensors=tensors(10)[:1])])
    assert str(verdict) == (
        "wrong_tensors: dump w/req_1 holds aux_hidden_states bfloat16[10, 3, 8], "
        "the job needs aux_hidden_states bfloat16[10, 3, 8], last_hidden_states bfloat16[10, 8]"
    )


def test_the_order_of_the_tensors_does_not_matter():
    assert by_tokens(4, [plugin_dump("a", 0, 4, tensors=tensors(4)[::-1])]) == Complete(("a",))


@pytest.mark.parametrize(
    "dumps",
    [
        [plugin_dump("a", 0, 6), plugin_dump("b", 5, 10)],
        [plugin_dump("a", 0, 10), plugin_dump("b", 3, 7)],
        [plugin_dump("a", 0, 10), plugin_dump("b", 0, 9)],
        [plugin_dump("a", 2, 6), plugin_dump("b", 3, 10)],
    ],
)
def test_ranges_that_overlap_are_refused(dumps):
    same = {dump.dump_id: 1 for dump in dumps}
    assert refused(by_tokens(10, dumps, same)) == "overlap"


def test_the_same_range_twice_is_one_reading_if_the_bytes_are_the_same():
    dumps = [plugin_dump("a", 0, 8), plugin_dump("b", 8, 10), plugin_dump("c", 8, 10)]
    assert by_tokens(10, dumps) == NeedDigests(("b", "c"))
    assert by_tokens(10, dumps, {"b": 5}) == NeedDigests(("c",))
    assert by_tokens(10, dumps, {"b": 5, "c": 5}) == Complete(("a", "b"))


def test_the_same_range_twice_with_other_bytes_is_refused():
    dumps = [plugin_dump("a", 0, 10), plugin_dump("b", 0, 10), plugin_dump("c", 0, 10)]
    assert refused(by_tokens(10, dumps, {"a": 5, "b": 5, "c": 6})) == "ambiguous"
    assert refused(by_tokens(10, dumps, {"a": 6, "b": 5, "c": 5})) == "ambiguous"


@pytest.mark.parametrize("decode", [plugin_dump("x", 10, 11), plugin_dump("x", 10, 11, prompt=10), plugin_dump("x", 9, 11)])
def test_rows_beyond_the_prompt_do_not_count(decode):
    assert by_tokens(10, [plugin_dump("a", 0, 10), decode]) == Complete(("a",))
    assert by_tokens(10, [decode]) == Incomplete(0, 10)


def test_a_dump_without_rows_says_nothing():
    empty = plugin_dump("x", 4, 4)
    assert by_tokens(10, [empty, plugin_dump("a", 0, 10)]) == Complete(("a",))
    assert by_tokens(10, [empty]) == Incomplete(0, 10)


def test_one_generation_must_tile_alone():
    halves = [plugin_dump("a", 0, 5), plugin_dump("b", 5, 10, generation=1)]
    assert by_tokens(10, halves) == Incomplete(0, 5)


def test_a_retracted_request_is_complete_with_its_second_generation():
    dumps = [plugin_dump("a", 0, 8), plugin_dump("b", 0, 8, generation=1), plugin_dump("c", 8, 10, generation=1)]
    assert by_tokens(10, dumps) == Complete(("b", "c"))


def test_two_whole_generations_are_two_readings_unless_they_are_the_same_bytes():
    dumps = [plugin_dump("a", 0, 10), plugin_dump("b", 0, 10, generation=1)]
    assert by_tokens(10, dumps) == NeedDigests(("a", "b"))
    assert by_tokens(10, dumps, {"a": 1, "b": 1}) == Complete(("a",))
    assert refused(by_tokens(10, dumps, {"a": 1, "b": 2})) == "ambiguous"


def test_a_generation_that_contradicts_itself_spoils_the_attempt():
    dumps = [plugin_dump("a", 0, 6), plugin_dump("b", 5, 10), plugin_dump("c", 0, 10, generation=1)]
    assert refused(by_tokens(10, dumps)) == "overlap"


# --- by count -----------------------------------------------------------------------------------------------------------


def by_count(rows, counts, *, chunk=None, digests=None):
    """Dumps of these row counts, in this order, called by their place."""
    dumps = [plain_dump(str(place), place, count) for place, count in enumerate(counts)]
    Random(rows).shuffle(dumps)
    return assemble_by_count(expected(rows), chunk, dumps, digests or {})


@pytest.mark.parametrize(
    ("rows", "chunk", "pattern"),
    [
        (5, None, (5,)),
        (7, 8, (7,)),
        (8, 8, (8,)),
        (9, 8, (8, 1)),
        (15, 8, (8, 7)),
        (16, 8, (8, 8)),
        (17, 8, (8, 8, 1)),
        (23, 8, (8, 8, 7)),
    ],
)
def test_a_prompt_is_published_in_whole_chunks_and_a_remainder(rows, chunk, pattern):
    assert chunk_pattern(rows, chunk) == pattern
    assert by_count(rows, pattern, chunk=chunk) == Complete(tuple(map(str, range(len(pattern)))))
    assert by_count(rows, pattern[:-1], chunk=chunk) == Incomplete(sum(pattern[:-1]), rows)
    assert by_count(rows, (), chunk=chunk) == Incomplete(0, rows)


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ([3, 6, 10], ["2"]),
        ([10, 1, 1, 1], ["0"]),
        ([1, 10, 9, 11, 1], ["1"]),
        ([20, 5, 5, 10], ["3"]),
    ],
)
def test_dumps_of_other_row_counts_are_strays(counts, chosen):
    assert by_count(10, counts) == Complete(tuple(chosen))


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ([3, 8, 8, 4], ["1", "2", "3"]),
        ([8, 3, 8, 20, 4], ["0", "2", "4"]),
        ([8, 1, 8, 1, 4, 1], ["0", "2", "4"]),
        ([4, 8, 8, 4], ["1", "2", "3"]),
        ([8, 4, 8, 4], ["0", "2", "3"]),
    ],
)
def test_strays_among_chunks_are_left_out_and_the_remainder_comes_last(counts, chosen):
    assert by_count(20, counts, chunk=8) == Complete(tuple(chosen))


@pytest.mark.parametrize("counts", [[4, 8, 8], [8, 4, 8], [4, 4, 8, 8]])
def test_a_remainder_before_the_last_chunk_is_not_its_own(counts):
    assert by_count(20, counts, chunk=8) == Incomplete(16, 20)


def test_a_chunk_less_than_needed_is_awaited():
    assert by_count(20, [8, 4], chunk=8) == Incomplete(8, 20)
    assert by_count(16, [8], chunk=8) == Incomplete(8, 16)


@pytest.mark.parametrize(
    ("rows", "chunk", "counts", "asked"),
    [(10, None, [10, 3, 10], ("0", "2")), (12, 8, [8, 8, 4], ("0", "1")), (12, 8, [8, 4, 4], ("1", "2"))],
)
def test_two_that_fit_are_one_reading_only_if_the_bytes_are_the_same(rows, chunk, counts, asked):
    first, second = asked
    assert by_count(rows, counts, chunk=chunk) == NeedDigests(asked)
    assert refused(by_count(rows, counts, chunk=chunk, digests={first: 1, second: 2})) == "ambiguous"
    verdict = by_count(rows, counts, chunk=chunk, digests={first: 1, second: 1})
    assert isinstance(verdict, Complete)
    assert first in verdict.dump_ids
    assert second not in verdict.dump_ids


@pytest.mark.parametrize(("rows", "counts"), [(20, [8, 8, 8, 4]), (16, [8, 8, 8])])
def test_more_whole_chunks_than_needed_are_refused_whatever_their_bytes(rows, counts):
    same = {str(place): 1 for place in range(len(counts))}
    assert refused(by_count(rows, counts, chunk=8, digests=same)) == "ambiguous"


def test_a_prefix_hit_leaves_too_few_rows():
    assert by_count(10, [1]) == Incomplete(0, 10)
    assert by_count(20, [8, 4], chunk=8) == Incomplete(8, 20)


def test_a_dump_of_the_right_length_must_hold_the_right_tensors():
    dumps = [plain_dump("a", 0, 3, tensors=()), plain_dump("b", 1, 10, tensors=tensors(10)[:1])]
    assert refused(assemble_by_count(expected(10), None, dumps, {})) == "wrong_tensors"
    assert assemble_by_count(expected(10), None, dumps[:1], {}) == Incomplete(0, 10)
    tail = [plain_dump("a", 0, 8), plain_dump("b", 1, 2, tensors=())]
    assert refused(assemble_by_count(expected(10), 8, tail, {})) == "wrong_tensors"


def test_rows_are_counted_in_tokens():
    assert Expected(token_bytes([1, 2, 3]), ARRAYS, CAPTURE, FINGERPRINT).rows == 3


@pytest.mark.parametrize("named", [None, {"tap/d0", "tap/d8"}, {"tap/d0", "tap/d8", "tap/other"}])
def test_a_capture_of_named_dumps_stands(named):
    dumps = pieces(10, 8)
    assert require_named(assemble_by_tokens(expected(10), dumps, {}), dumps, named) == Complete(("d0", "d8"))


@pytest.mark.parametrize("named", [set(), {"tap/d0"}, {"tap/d8", "tap/d80"}])
def test_a_capture_with_a_dump_that_its_answer_does_not_name_is_refused(named):
    dumps = pieces(10, 8)
    assert refused(require_named(assemble_by_tokens(expected(10), dumps, {}), dumps, named)) == "unnamed_dump"


def test_an_answer_that_names_dumps_knows_none_without_a_name():
    dumps = [plugin_dump("d", 0, 8, name=None)]
    assert refused(require_named(Complete(("d",)), dumps, {"tap/d"})) == "unnamed_dump"
    assert require_named(Complete(("d",)), dumps, None) == Complete(("d",))


def test_dumps_that_were_not_chosen_need_no_name():
    dumps = [plugin_dump("d", 0, 8), plugin_dump("stray", 0, 8)]
    assert require_named(Complete(("d",)), dumps, {"tap/d"}) == Complete(("d",))
    assert require_named(Incomplete(0, 8), dumps, set()) == Incomplete(0, 8)


@pytest.mark.parametrize("other", [{"capture": replace(CAPTURE, aux_layer_ids=(1, 3, 4))}, {"model_fingerprint": "weights-2"}])
def test_what_another_tap_captured_is_refused_however_well_it_fits(other):
    by_tokens = assemble_by_tokens(expected(8), [plugin_dump("d", 0, 8, **other)], {})
    by_count = assemble_by_count(expected(8), None, [plain_dump("d", 1, 8, **other)], {})
    assert {by_tokens.reason, by_count.reason} == {"wrong_capture"}
