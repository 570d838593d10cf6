"""From segments to the bytes of shard objects."""

import numpy as np
import pytest
from statetap.adapters.store.shard_assembly import WINDOW_BYTES, plan_shards
from statetap.core.placement import Geometry
from statetap.core.spec import HiddenArray
from statetap.ports import Segment, UnitWrite
from statetap_client import sharding

ARRAY = HiddenArray("last_hidden_states", (2,), "float16")
GEOMETRY = Geometry(rows_per_shard=8, rows_per_chunk=2, alignment=1)


def unit(*segments: tuple[int, bytes], rows: int = 8, row_start: int = 0, array: str = ARRAY.name) -> UnitWrite:
    return UnitWrite(
        location="/store",
        arrays=(ARRAY,),
        geometry=GEOMETRY,
        row_start=row_start,
        rows=rows,
        fence=1,
        segments=[Segment(array, row, memoryview(data)) for row, data in segments],
    )


def payload_and_index(plan) -> tuple[bytes, list[list[int]]]:
    data = b"".join(plan.buffers())
    size = sharding.index_bytes(4)
    return data[:-size], sharding.decode_index(data[-size:], 4).tolist()


def test_untouched_chunks_are_missing_and_touched_ones_are_zero_filled() -> None:
    [plan] = plan_shards(unit((1, b"aaaa"), (5, b"bbbbcccc")))
    payload, index = payload_and_index(plan)
    assert payload == b"\0\0\0\0aaaa" + b"\0\0\0\0bbbb" + b"cccc\0\0\0\0"
    missing = [sharding.MISSING] * 2
    assert index == [[0, 8], missing, [8, 8], [16, 8]]


def test_a_gap_inside_one_chunk_is_zero() -> None:
    wide = Geometry(8, 8, 1)
    [plan] = plan_shards(UnitWrite(**{**as_dict(unit((1, b"aaaa"), (3, b"bbbb"))), "geometry": wide}))
    assert b"".join(plan.buffers())[:32] == b"\0\0\0\0aaaa\0\0\0\0bbbb" + bytes(16)


def test_a_segment_across_shards_is_cut_and_empty_shards_have_no_object() -> None:
    plans = plan_shards(unit((6, b"aaaabbbbccccdddd"), rows=24, row_start=16))
    assert [plan.key for plan in plans] == ["last_hidden_states/c/2/0", "last_hidden_states/c/3/0"]
    assert payload_and_index(plans[0])[0] == b"aaaabbbb"
    assert payload_and_index(plans[1])[0] == b"ccccdddd"


def test_payloads_are_views_not_copies() -> None:
    data = bytearray(4 * 8)
    [plan] = plan_shards(unit((0, data)))
    payload = next(plan.buffers())
    data[0] = 77
    assert payload[0] == 77


def test_long_payloads_come_in_windows() -> None:
    rows = 3 * WINDOW_BYTES // 4
    geometry = Geometry(rows, rows, 1)
    [plan] = plan_shards(UnitWrite(**{**as_dict(unit((0, bytes(4 * rows - 4)), rows=rows)), "geometry": geometry}))
    sizes = [len(buffer) for buffer in plan.buffers()]
    assert max(sizes) <= WINDOW_BYTES
    assert sum(sizes) == 4 * rows + sharding.index_bytes(1)


def test_a_unit_without_segments_has_no_objects() -> None:
    assert plan_shards(unit()) == []


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (lambda: unit((0, b"abc")), "not whole rows"),
        (lambda: unit((2, b"aaaa"), (1, b"bbbb")), "out of order"),
        (lambda: unit((0, b"aaaabbbb"), (1, b"bbbb")), "overlap"),
        (lambda: unit((7, b"aaaabbbb")), "leave the unit's 8 rows"),
        (lambda: unit(rows=9), "not whole shards"),
        (lambda: unit(row_start=4), "not whole shards"),
        (lambda: unit((0, b"aaaa"), array="stranger"), "stranger"),
    ],
)
def test_units_that_break_the_ports_terms_are_refused(bad, match) -> None:
    with pytest.raises(ValueError, match=match):
        plan_shards(bad())


def test_numpy_views_of_any_shape_are_taken() -> None:
    rows = np.arange(16, dtype=np.float16).reshape(8, 2)
    whole = UnitWrite(**{**as_dict(unit()), "segments": [Segment(ARRAY.name, 0, memoryview(rows))]})
    [plan] = plan_shards(whole)
    assert payload_and_index(plan)[0] == rows.tobytes()


def as_dict(whole: UnitWrite) -> dict:
    return {name: getattr(whole, name) for name in UnitWrite.__slots__}
