"""Reads one HTTP/1.1 reply out of the bytes of a connection (RFC 9112), as far as a server may send one that is asked plainly.

Pure, and strict: a reply that could be read in two ways is none. The client takes no encoding and asks with GET and
POST alone, so the bytes of the body are the content, and only its status says that a reply has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_HEAD_BYTES = 64 << 10
MOST_BODY_BYTES = 256 << 20
# A server may say so many things before its reply.
MOST_INTERIM = 10

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: ([^\r\n]*))?")
# The blanks around a value are stripped afterwards: patterns that compete for them take their cube of time.
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)")
_LENGTH = re.compile(rb"[0-9]{1,18}")
# Its extensions mean nothing to us.
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")
_BODILESS = frozenset({204, 304})


class BadReply(Exception):
    """What came is no reply, or none that is read here."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`keeps`: the server leaves the connection open, and nothing came after the reply."""

    status: int
    reason: str
    content: bytes
    keeps: bool


class ReplyReader:
    """Takes what comes on a connection after a request. `received` is whether anything came."""

    def __init__(self) -> None:
        self._got = bytearray()
        # How far the bytes are read: the head, or the chunks so far.
        self._at = 0
        self._interim = 0
        self._status = 0
        self._reason = ""
        self._keeps = False
        self._length: int | None = None
        self._chunks: list[bytes] | None = None

    @property
    def received(self) -> bool:
        return bool(self._got)

    def feed(self, data: bytes) -> Reply | None:
        """The reply, once all of it is there.

        Raises:
            BadReply: what came so far cannot become one.
        """
        self._got += data
        while not self._status:
            if not self._read_head():
                return None
        if self._chunks is not None:
            return self._read_chunks(self._chunks)
        if self._length is None:
            _require(len(self._got) - self._at <= MOST_BODY_BYTES, f"a body of more than {MOST_BODY_BYTES} bytes")
            return None
        end = self._at + self._length
        return None if len(self._got) < end else self._reply(bytes(self._got[self._at : end]), end)

    def end(self) -> Reply:
        """The connection was closed: the reply, if it is one that ends like this.

        Raises:
            BadReply: it is cut off.
        """
        _require(bool(self._status) and self._length is None and self._chunks is None, "the connection was closed before its end")
        return Reply(self._status, self._reason, bytes(self._got[self._at :]), False)

    def _read_head(self) -> bool:
        """False: it is not whole yet. What a server says before its reply (100 Continue) is passed over."""
        end = self._got.find(b"\r\n\r\n", self._at)
        _require_short("head", (len(self._got) if end < 0 else end) - self._at)
        if end < 0:
            return False
        first, *lines = bytes(self._got[self._at : end]).split(b"\r\n")
        self._at = end + 4
        if (said := _STATUS_LINE.fullmatch(first)) is None:
            raise BadReply(f"it begins with {first[:80]!r}")
        status = int(said[2])
        if status >= 200:
            self._status, self._reason = status, (said[3] or b"").decode("latin-1")
            self._read_headers(said[1] == b"1", lines)
        else:
            _require(status != 101, "it wants to speak another protocol")
            self._interim += 1
            _require(self._interim <= MOST_INTERIM, f"more than {MOST_INTERIM} interim replies")
        return True

    def _read_headers(self, is_newer: bool, lines: list[bytes]) -> None:
        lengths: set[bytes] = set()
        codings: list[bytes] = []
        options: list[bytes] = []
        for line in lines:
            if (header := _HEADER.fullmatch(line)) is None:
                raise BadReply(f"a header is {line[:80]!r}")
            value = header[2].strip(b" \t")
            match header[1].lower():
                case b"content-length":
                    lengths.add(value)
                case b"transfer-encoding":
                    codings.append(value.lower())
                case b"connection":
                    options += [option.strip().lower() for option in value.split(b",")]
        self._keeps = b"close" not in options and (is_newer or b"keep-alive" in options)
        if self._status in _BODILESS:
            self._length = 0
        elif codings:
            _require(codings == [b"chunked"] and is_newer and not lengths, f"its body comes as {b', '.join(codings)[:80]!r}")
            self._chunks = []
        elif lengths:
            (length, *others) = lengths
            _require(not others and _LENGTH.fullmatch(length) is not None, "nobody can say how long its body is")
            self._length = int(length)
            _require(self._length <= MOST_BODY_BYTES, f"a body of more than {MOST_BODY_BYTES} bytes")

    def _read_chunks(self, chunks: list[bytes]) -> Reply | None:
        while (line_end := self._got.find(b"\r\n", self._at)) >= 0:
            if (said := _CHUNK.fullmatch(self._got, self._at, line_end)) is None:
                raise BadReply(f"a chunk begins with {bytes(self._got[self._at : line_end])[:80]!r}")
            size = int(said[1], 16)
            if not size:
                return self._read_trailer(chunks, line_end)
            _require(self._at + size <= MOST_BODY_BYTES, f"a body of more than {MOST_BODY_BYTES} bytes")
            start, end = line_end + 2, line_end + 2 + size
            if len(self._got) < end + 2:
                return None
            _require(self._got[end : end + 2] == b"\r\n", "a chunk is longer than it says")
            chunks.append(bytes(self._got[start:end]))
            self._at = end + 2
        _require_short("chunk's first line", len(self._got) - self._at)
        return None

    def _read_trailer(self, chunks: list[bytes], line_end: int) -> Reply | None:
        """What comes after the last chunk means nothing to us."""
        end = self._got.find(b"\r\n\r\n", line_end)
        _require_short("trailer", (len(self._got) if end < 0 else end) - line_end)
        return None if end < 0 else self._reply(b"".join(chunks), end + 4)

    def _reply(self, content: bytes, end: int) -> Reply:
        return Reply(self._status, self._reason, content, self._keeps and len(self._got) == end)


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise BadReply(otherwise)


def _require_short(what: str, nbytes: int) -> None:
    _require(nbytes <= MOST_HEAD_BYTES, f"a {what} of more than {MOST_HEAD_BYTES} bytes")
