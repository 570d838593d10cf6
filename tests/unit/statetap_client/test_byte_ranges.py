"""Byte ranges of files: neighbours in one call, and what goes past the page cache."""

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statetap_client import byte_ranges
from statetap_client.byte_ranges import GAP_BYTES, ByteRange, RangeFile, TooShort, coalesce

PAGE = mmap.PAGESIZE
NBYTES = 64 * PAGE + 100


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranges") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(NBYTES))
    return path


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def file(request, path):
    file = RangeFile(path, direct=request.param)
    yield file
    file.close()


class Calls:
    """Every preadv: (descriptor, offset, bytes asked for)."""

    def __init__(self, monkeypatch, most: int | None = None) -> None:
        self.made: list[tuple[int, int, int]] = []
        preadv = os.preadv

        def counted(descriptor, buffers, offset):
            self.made.append((descriptor, offset, sum(len(b) for b in buffers)))
            return preadv(descriptor, buffers if most is None else [buffers[0][:most]], offset)

        monkeypatch.setattr(byte_ranges.os, "preadv", counted)


def pages(count: int) -> memoryview:
    """Memory that begins at a page."""
    return memoryview(mmap.mmap(-1, count * PAGE))


@settings(max_examples=60, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, NBYTES - 1), st.integers(1, 9 * PAGE), st.booleans(), st.booleans()), max_size=8))
def test_any_ranges_are_filled_exactly(path, spans) -> None:
    """At pages or not, with room for whole pages or not; what lies behind the room stays as it is."""
    data = path.read_bytes()
    for direct in (False, True):
        file = RangeFile(path, direct=direct)
        ranges, rooms = [], []
        for anywhere, most, at_page, roomy in spans:
            start = anywhere // PAGE * PAGE if at_page else anywhere
            length = min(most, NBYTES - start)
            memory = pages(length // PAGE + 3)
            memory[:] = b"\xa5" * len(memory)
            room = -(-length // PAGE) * PAGE if roomy else length
            ranges.append(ByteRange(start, length, memory[:room]))
            rooms.append(memory[room:])
        file.read_into(ranges)
        file.close()
        for wanted, behind in zip(ranges, rooms, strict=True):
            assert wanted.memory[: wanted.nbytes] == data[wanted.offset : wanted.end]
            assert set(behind) == {0xA5}


def test_neighbours_are_read_in_one_call(path, monkeypatch) -> None:
    file, calls = RangeFile(path), Calls(monkeypatch)
    near = [ByteRange(offset, 100, pages(1)[:100]) for offset in (5000, 300, 100, 200)]
    file.read_into([*near, ByteRange(20 * PAGE, 50, pages(1)[:50])])
    assert [(offset, nbytes) for _, offset, nbytes in calls.made] == [(100, 5000), (20 * PAGE, 50)]
    file.close()


def test_ranges_apart_or_over_each_other_are_read_by_themselves() -> None:
    ranges = [ByteRange(offset, 100, pages(1)) for offset in (0, 50, 150, 250 + GAP_BYTES, 351 + 2 * GAP_BYTES)]
    assert [[r.offset for r in run] for run in coalesce(ranges)] == [[0], [50, 150, 250 + GAP_BYTES], [351 + 2 * GAP_BYTES]]


def test_short_reads_are_finished(file, path, monkeypatch) -> None:
    Calls(monkeypatch, most=3 * PAGE)
    wanted = ByteRange(PAGE, 20 * PAGE + 7, pages(21))
    file.read_into([wanted])
    assert wanted.memory[: wanted.nbytes] == path.read_bytes()[wanted.offset : wanted.end]


def test_a_file_that_ends_before_is_told(file) -> None:
    for offset in (63 * PAGE, 64 * PAGE, 65 * PAGE, 64 * PAGE + 50):
        with pytest.raises(TooShort, match=rf"ends at byte {max(offset, NBYTES)}"):
            file.read_into([ByteRange(offset, 2 * PAGE, pages(2))])


def test_the_last_page_is_read_as_far_as_it_goes(file, path) -> None:
    wanted = ByteRange(62 * PAGE, 2 * PAGE + 100, pages(3))
    file.read_into([wanted])
    assert wanted.memory[: wanted.nbytes] == path.read_bytes()[62 * PAGE :]


def test_whole_pages_go_past_the_page_cache_and_others_through_it(path, monkeypatch) -> None:
    file, calls = RangeFile(path, direct=True), Calls(monkeypatch)
    direct = next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if is_direct(int(fd.name), path))
    file.read_into([ByteRange(0, 100, pages(1)), ByteRange(PAGE, PAGE, pages(2)[100:]), ByteRange(7, PAGE, pages(2))])
    assert [descriptor == direct for descriptor, _, _ in calls.made] == [True, False, False]
    file.close()


def test_a_file_system_that_refuses_is_read_through_the_page_cache(path, monkeypatch) -> None:
    preadv, opened = os.preadv, RangeFile(path, direct=True)

    def refuse(descriptor, buffers, offset):
        if descriptor != opened.descriptor:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(byte_ranges.os, "preadv", refuse)
    wanted = ByteRange(0, PAGE, pages(1))
    opened.read_into([wanted])
    assert wanted.memory == path.read_bytes()[:PAGE]
    opened.close()


def is_direct(descriptor: int, path) -> bool:
    import fcntl

    try:
        same = Path(f"/proc/self/fd/{descriptor}").readlink() == path
        return same and bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    except OSError:
        return False
