from __future__ import annotations

import time
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.adapters.inference import replies
from statetap.adapters.inference.replies import BadReply, Reply, ReplyReader

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\ncontent"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\ncon\r\nA;of=some use\r\n\r\ntent\r\n12\r\n0\r\nTrailer: passed over\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" + PLAIN


def read(*pieces: bytes) -> Reply | None:
    reader = ReplyReader()
    *earlier, last = [reader.feed(piece) for piece in pieces]
    assert earlier == [None] * len(earlier)
    return last


@pytest.mark.parametrize(
    ("raw", "content"),
    [(PLAIN, b"content"), (CONTINUED, b"content"), (CHUNKED, b"con\r\ntent\r\n12")],
    ids=["length", "100", "chunks"],
)
@given(cuts=st.sets(st.integers(1, 150)))
def test_a_reply_is_the_same_wherever_it_is_cut(raw: bytes, content: bytes, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    pieces = [raw[start:end] for start, end in pairwise(places)]
    assert read(*pieces) == Reply(200, "OK", content, keeps=True)


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        ("HTTP/1.1 200 OK\r\ncontent-length:0", True),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close", False),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: a, close", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive", True),
    ],
)
def test_a_connection_is_kept_if_the_server_keeps_it(head: str, keeps: bool) -> None:
    assert read(f"{head}\r\n\r\n".encode()) == Reply(200, "OK", b"", keeps)


def test_a_connection_on_which_more_came_than_was_asked_for_is_not_kept() -> None:
    assert read(PLAIN + b"H") == Reply(200, "OK", b"content", keeps=False)
    assert read(CHUNKED + b"H") == Reply(200, "OK", b"con\r\ntent\r\n12", keeps=False)


@pytest.mark.parametrize("status", [204, 304])
def test_some_replies_have_no_body_whatever_they_say(status: int) -> None:
    assert read(f"HTTP/1.1 {status} \r\nContent-Length: 5\r\n\r\n".encode()) == Reply(status, "", b"", keeps=True)


def test_a_reply_without_a_length_ends_with_the_connection() -> None:
    reader = ReplyReader()
    assert reader.feed(b"HTTP/1.1 500 No\r\n\r\nsome") is None
    assert reader.feed(b"thing") is None
    assert reader.end() == Reply(500, "No", b"something", keeps=False)


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\n", PLAIN[:-1], CHUNKED[:-1], b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_what_is_cut_off_is_no_reply(raw: bytes) -> None:
    reader = ReplyReader()
    assert reader.feed(raw) is None
    assert reader.received == bool(raw)
    with pytest.raises(BadReply, match="before its end"):
        reader.end()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "it begins with b'SSH"),
        (b"HTTP/2 200\r\n\r\n", "it begins with"),
        (b"HTTP/1.1 700 No\r\n\r\n", "it begins with"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 200 OK\r\n folded\r\n\r\n", "a header is"),
        (b"HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\n", "a header is"),
        (b"HTTP/1.1 200 OK\r\nA: b\0c\r\n\r\n", "a header is"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "how long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n", "how long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n", "how long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "its body comes as"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "its body comes as"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "its body comes as"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\n", "a chunk begins with"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "a chunk begins with"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", "longer than it says"),
    ],
)
def test_what_can_be_read_in_two_ways_is_no_reply(raw: bytes, reason: str) -> None:
    with pytest.raises(BadReply, match=reason):
        ReplyReader().feed(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 51\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"b" * 51,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n33\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"19\r\n" + b"b" * 25 + b"\r\n") * 3,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;" + b"e" * 100,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"b" * 100,
    ],
    ids=["head", "length", "until the end", "a chunk", "chunks", "chunk's line", "trailer"],
)
def test_nothing_grows_without_a_bound(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST_HEAD_BYTES", 90)
    monkeypatch.setattr(replies, "MOST_BODY_BYTES", 50)
    with pytest.raises(BadReply, match="of more than"):
        ReplyReader().feed(raw)


def test_a_server_may_say_only_so_much_before_its_reply() -> None:
    with pytest.raises(BadReply, match="more than 10 interim replies"):
        ReplyReader().feed(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 11 + PLAIN)


@pytest.mark.parametrize("header", [b"A:" + b" " * 60_000 + b"\0", b"A: x" + b" " * 60_000 + b"y"], ids=["bad", "good"])
def test_blanks_take_no_time(header: bytes) -> None:
    """Patterns that compete for them would keep the event loop for hours."""
    began = time.process_time()
    with suppress(BadReply):
        ReplyReader().feed(b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n")
    assert time.process_time() - began < 1
