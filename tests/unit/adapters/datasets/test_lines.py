from __future__ import annotations

import gzip
import tracemalloc
from collections import deque
from collections.abc import Iterator
from itertools import chain

import pytest
from statetap.adapters.datasets.limits import MIB, IntakeLimits
from statetap.adapters.datasets.lines import BATCH_BYTES, LineBatch, LineBatches
from statetap.ports import DatasetRefused


def cut(*chunks: bytes, gzipped: bool = False, **limits: int) -> Iterator[LineBatch]:
    lines = LineBatches(IntakeLimits(**limits), gzipped=gzipped)
    for chunk in chunks:
        yield from lines.feed(chunk)
    yield from lines.finish()


def test_a_small_body_is_one_batch():
    assert list(cut(b"one\nt", b"wo\nthree")) == [LineBatch(1, b"one\ntwo\nthree")]


def test_batches_end_at_newlines_and_know_their_first_line():
    line = b"x" * 1000 + b"\n"
    batches = list(cut(*([line * 100] * 25)))
    assert len(batches) > 1
    assert all(batch.text.endswith(b"\n") and len(batch.text) < 2 * BATCH_BYTES for batch in batches)
    lines = [batch.text.count(b"\n") for batch in batches]
    assert [batch.first_line for batch in batches] == [1 + sum(lines[:index]) for index in range(len(lines))]
    assert b"".join(batch.text for batch in batches) == line * 2500


def test_a_line_longer_than_a_batch_stays_whole():
    long = b"y" * (3 * MIB) + b"\n"
    pieces = [(long + b"z\n")[at : at + 70_000] for at in range(0, len(long) + 2, 70_000)]
    assert b"".join(batch.text for batch in cut(*pieces)) == long + b"z\n"


def test_a_line_that_grows_too_long_is_refused_before_it_ends():
    lines = LineBatches(IntakeLimits(line_bytes=1000), gzipped=False)
    list(lines.feed(b"a\nb\n" + b"c" * 900))
    with pytest.raises(DatasetRefused, match="longer than 1000 bytes") as caught:
        list(lines.feed(b"c" * 200))
    assert caught.value.line == 3


def test_a_body_that_is_too_long_is_refused():
    with pytest.raises(DatasetRefused, match="split it"):
        list(cut(b"a\n" * 10, body_bytes=19))


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_gzip_members_follow_each_other_and_zeros_pad_the_end(size):
    packed = gzip.compress(b"one\n" * 1000) + gzip.compress(b"two\n") + b"\0" * 100
    chunks = [packed[at : at + size] for at in range(0, len(packed), size)]
    assert b"".join(batch.text for batch in cut(*chunks, gzipped=True)) == b"one\n" * 1000 + b"two\n"


def test_a_gzip_bomb_is_refused_early():
    bomb = gzip.compress(b"\0" * (64 * MIB))
    lines = LineBatches(IntakeLimits(gzip_ratio=200, ratio_from_bytes=MIB), gzipped=True)
    with pytest.raises(DatasetRefused, match="200 times its size"):
        list(lines.feed(bomb))
    # It gave up at 200 times the packed bytes it was given, not at the end.
    assert len(lines._pending) < 200 * len(bomb)


@pytest.mark.parametrize("text", [b"", b"x\n"])
def test_a_stream_of_tiny_members_is_refused_early(text):
    """Each takes a new decompressor: a MiB of them took seconds."""
    packed = gzip.compress(text, mtime=0)
    with pytest.raises(DatasetRefused, match="pack the body as one"):
        list(cut(packed * (MIB // len(packed)), gzipped=True))
    assert len(list(cut(packed * 1000, gzipped=True))) == bool(text)


def test_a_gigabyte_without_a_newline_costs_no_more_than_a_line():
    lines = LineBatches(IntakeLimits(), gzipped=False)
    tracemalloc.start()
    try:
        with pytest.raises(DatasetRefused, match="longer than 67108864 bytes"):
            deque(chain.from_iterable(lines.feed(b"a" * MIB) for _ in range(1024)))
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (gzip.compress(b"one\n", mtime=0)[:-4], "cut off"),
        (b"", "cut off"),
        (b'{"text": "plain"}\n', "not a gzip stream"),
        (gzip.compress(b"one\n", mtime=0) + b"rest", "not a gzip stream"),
    ],
)
def test_a_broken_gzip_stream_is_refused(body, reason):
    with pytest.raises(DatasetRefused, match=reason):
        list(cut(body, gzipped=True))
