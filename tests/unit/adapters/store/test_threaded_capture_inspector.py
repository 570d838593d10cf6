"""The inspector: digests, and every fault that a value can have, at the ends of rows, blocks and parts."""

import asyncio
import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from statetap.adapters.store import threaded_capture_inspector
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart

from tests.fakes.store_on_disk import AUX, LAST, as_view, random_rows

DTYPES = ["bfloat16", "float16", "float32"]
ROWS, LAYERS, HIDDEN = 12, 3, 8


@pytest.fixture(params=[1, 4 << 20], ids=["a row a block", "one block"], autouse=True)
def block_bytes(request, monkeypatch) -> None:
    monkeypatch.setattr(threaded_capture_inspector, "BLOCK_BYTES", request.param)


@pytest.fixture
def inspector():
    inspector = ThreadedCaptureInspector()
    yield inspector
    inspector.close()


def make_capture(dtype: str, hidden: int = HIDDEN):
    arrays = (HiddenArray(AUX, (LAYERS, hidden), dtype), HiddenArray(LAST, (hidden,), dtype))
    rng = np.random.default_rng(3)
    return arrays, {array.name: random_rows(array, ROWS, rng) for array in arrays}


def in_parts(capture, *bounds: int):
    edges = [0, *bounds, ROWS]
    return [CapturePart({name: as_view(rows[start:end]) for name, rows in capture.items()}) for start, end in pairwise(edges)]


def with_checksums(parts: list[CapturePart], arrays) -> list[CapturePart]:
    """Each part with the sums of its rows, taken word by word in Python, as the format says."""
    summed = []
    for part in parts:
        rows = len(part.views[arrays[0].name]) // arrays[0].row_bytes
        sums = [0] * rows
        for array in arrays:
            row_bytes = array.row_bytes
            width = next(w for w in (8, 4, 2) if row_bytes // (array.row_shape[0] if len(array.row_shape) == 2 else 1) % w == 0)
            for row in range(rows):
                data = bytes(part.views[array.name][row * row_bytes : (row + 1) * row_bytes])
                words = (data[at : at + width] for at in range(0, row_bytes, width))
                sums[row] += sum(int.from_bytes(word, "little", signed=True) for word in words)
        checksums = b"".join((total % 2**64).to_bytes(8, "little") for total in sums)
        summed.append(replace(part, row_checksums=memoryview(checksums)))
    return summed


def bad_values(detail: str) -> Refusal:
    return Refusal(RefusalReason.BAD_VALUES, detail)


def wrong_checksum(count: int, first: int) -> Refusal:
    detail = f"{count} rows, the first of them row {first}, are not what their source computed"
    return Refusal(RefusalReason.WRONG_CHECKSUM, detail)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(), (5,), (1, 11)])
async def test_a_good_capture_has_the_digest_of_its_bytes(inspector, dtype, bounds) -> None:
    arrays, capture = make_capture(dtype)
    report = await inspector.inspect(in_parts(capture, *bounds), arrays)
    assert report.refusal is None
    assert report.digest == xxhash.xxh3_64_intdigest(capture[AUX].tobytes() + capture[LAST].tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (7, 5), (ROWS - 1, HIDDEN - 1)])
async def test_values_that_are_not_finite(inspector, dtype, value, row, column) -> None:
    arrays, capture = make_capture(dtype)
    capture[LAST][row, column] = value
    report = await inspector.inspect(in_parts(capture, 5), arrays)
    assert report.refusal == bad_values(f"last_hidden_states: row {row} is not finite")
    assert report.digest == xxhash.xxh3_64_intdigest(capture[AUX].tobytes() + capture[LAST].tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
async def test_the_largest_finite_values_pass(inspector, dtype) -> None:
    arrays, capture = make_capture(dtype)
    bits = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}[dtype]
    integers = capture[LAST].view(np.uint32 if dtype == "float32" else np.uint16)
    integers[4, 2] = bits
    integers[5, 2] = bits | (1 << (8 * integers.itemsize - 1))
    assert (await inspector.inspect(in_parts(capture), arrays)).refusal is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [0, 6, ROWS - 1])
@pytest.mark.parametrize(
    ("value", "fault"), [(0.0, "is all zero"), (-0.0, "is all zero"), (1.5, "is constant"), (-3, "is constant")]
)
async def test_dead_rows(inspector, dtype, row, value, fault) -> None:
    arrays, capture = make_capture(dtype)
    capture[LAST][row] = value
    assert (await inspector.inspect(in_parts(capture, 5), arrays)).refusal == bad_values(f"last_hidden_states: row {row} {fault}")


async def test_zeros_of_both_signs_are_all_zero(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    capture[LAST][3] = 0
    capture[LAST][3, ::2] = -0.0
    assert (await inspector.inspect(in_parts(capture), arrays)).refusal == bad_values("last_hidden_states: row 3 is all zero")


@pytest.mark.parametrize(("value", "fault"), [(0, "is all zero"), (2, "is constant"), (np.nan, "is not finite")])
async def test_one_dead_layer_among_others_is_a_fault(inspector, value, fault) -> None:
    arrays, capture = make_capture("bfloat16")
    capture[AUX][9, 1] = value
    report = await inspector.inspect(in_parts(capture, 5), arrays)
    assert report.refusal == bad_values(f"aux_hidden_states: row 9 {fault} in layer 2 of 3")


async def test_a_row_that_merely_looks_constant_passes(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    capture[LAST][2] = 1
    capture[LAST][2, 1] = 2
    capture[LAST][3] = 1
    capture[LAST][3, 1] = -1
    capture[LAST][4] = 0
    capture[LAST][4, 1] = 1
    assert (await inspector.inspect(in_parts(capture), arrays)).refusal is None


async def test_the_first_fault_in_store_order_is_told(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    capture[LAST][0] = 0
    capture[AUX][8, 0, 0] = np.inf
    report = await inspector.inspect(in_parts(capture), arrays)
    assert report.refusal == bad_values("aux_hidden_states: row 8 is not finite in layer 1 of 3")


# Row bytes that are whole words of 8, 4 and 2 bytes.
@pytest.mark.parametrize(("dtype", "hidden"), [("bfloat16", 8), ("float32", 7), ("bfloat16", 6), ("float16", 7)])
async def test_rows_that_add_up_to_their_checksums_pass(inspector, dtype, hidden) -> None:
    arrays, capture = make_capture(dtype, hidden)
    parts = with_checksums(in_parts(capture, 5), arrays)
    report = await inspector.inspect(parts, arrays)
    assert report.refusal is None
    assert report.digest == xxhash.xxh3_64_intdigest(capture[AUX].tobytes() + capture[LAST].tobytes())


@pytest.mark.parametrize(("dtype", "hidden"), [("bfloat16", 8), ("float32", 7), ("bfloat16", 6), ("float16", 7)])
@pytest.mark.parametrize(("name", "place"), [(AUX, (7, 1, 3)), (LAST, (7, 0)), (LAST, (7, -1))])
async def test_a_bit_that_was_changed_after_the_source_summed_it_is_found(inspector, dtype, hidden, name, place) -> None:
    arrays, capture = make_capture(dtype, hidden)
    given = with_checksums(in_parts(capture, 5), arrays)
    bits = capture[name].view(np.uint32 if dtype == "float32" else np.uint16)
    bits[place] ^= 1
    parts = [replace(part, row_checksums=before.row_checksums) for part, before in zip(in_parts(capture, 5), given, strict=True)]
    assert (await inspector.inspect(parts, arrays)).refusal == wrong_checksum(1, 7)


async def test_rows_that_changed_places_are_found(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    given = with_checksums(in_parts(capture), arrays)
    for rows in capture.values():
        rows[[2, 9]] = rows[[9, 2]]
    parts = [replace(in_parts(capture)[0], row_checksums=given[0].row_checksums)]
    assert (await inspector.inspect(parts, arrays)).refusal == wrong_checksum(2, 2)


async def test_a_buffer_that_was_used_again_is_found_whatever_its_values(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    given = with_checksums(in_parts(capture), arrays)
    capture[LAST][6] = np.nan  # a fault of its own, too: what was not computed is not judged
    capture[AUX][3:] = capture[AUX][0]
    parts = [replace(in_parts(capture)[0], row_checksums=given[0].row_checksums)]
    assert (await inspector.inspect(parts, arrays)).refusal == wrong_checksum(ROWS - 3, 3)


async def test_where_only_some_dumps_bring_checksums_theirs_are_compared(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    plain, summed = with_checksums(in_parts(capture, 5), arrays)
    plain = replace(plain, row_checksums=None)
    assert (await inspector.inspect([plain, summed], arrays)).refusal is None
    wrong = bytearray(summed.row_checksums)
    wrong[8] ^= 1
    torn = replace(summed, row_checksums=memoryview(bytes(wrong)))
    assert (await inspector.inspect([plain, torn], arrays)).refusal == wrong_checksum(1, 6)


async def test_the_digest_of_a_dump_is_in_table_order_whatever_the_mappings(inspector) -> None:
    _, capture = make_capture("bfloat16")
    views = {name: as_view(capture[name]) for name in (LAST, AUX)} | {"token_ids": memoryview(b"1234")}
    wanted = xxhash.xxh3_64_intdigest(capture[AUX].tobytes() + capture[LAST].tobytes())
    assert await inspector.digest(views) == wanted


@pytest.mark.parametrize("at_once", [True, False])
async def test_only_a_large_capture_makes_the_loop_wait_for_a_thread(inspector, monkeypatch, at_once) -> None:
    arrays, capture = make_capture("bfloat16")
    nbytes = sum(rows.nbytes for rows in capture.values())
    monkeypatch.setattr(threaded_capture_inspector, "SMALL_BYTES", nbytes if at_once else nbytes - 1)
    looked = asyncio.ensure_future(inspector.inspect(in_parts(capture, 5), arrays))
    await asyncio.sleep(0)
    assert looked.done() == at_once
    monkeypatch.setattr(threaded_capture_inspector, "SMALL_BYTES", 1 << 30)
    assert await looked == await inspector.inspect(in_parts(capture, 5), arrays)


async def test_the_loop_looks_at_one_capture_a_turn(inspector, monkeypatch) -> None:
    looking = threading.Lock()
    real = threaded_capture_inspector._inspect

    def on_the_loop_alone(parts, arrays):
        with looking if threading.current_thread() is not threading.main_thread() else nullcontext():
            return real(parts, arrays)

    monkeypatch.setattr(threaded_capture_inspector, "_inspect", on_the_loop_alone)
    arrays, capture = make_capture("bfloat16")
    with looking:
        looked = [asyncio.ensure_future(inspector.inspect(in_parts(capture), arrays)) for _ in range(8)]
        await asyncio.sleep(0)
        assert sum(one.done() for one in looked) == 1
    assert len({report.digest for report in await asyncio.gather(*looked)}) == 1
    looked = [asyncio.ensure_future(inspector.inspect(in_parts(capture), arrays))]
    await asyncio.sleep(0)
    assert looked[0].done()


async def test_a_small_capture_of_many_parts_is_handed_over(inspector) -> None:
    arrays, capture = make_capture("bfloat16")
    looked = asyncio.ensure_future(inspector.inspect(in_parts(capture, *range(1, ROWS)), arrays))
    await asyncio.sleep(0)
    assert not looked.done()
    assert (await looked).refusal is None
