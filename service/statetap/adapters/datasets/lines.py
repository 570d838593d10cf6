"""From a stream of bytes to batches of whole lines: gzip undone, limits kept, nothing decoded.

A batch is about `BATCH_BYTES` of text, or one line that is longer. Lines are counted from 1, blank ones included.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from statetap.adapters.datasets.limits import MIB, IntakeLimits
from statetap.ports import DatasetRefused

BATCH_BYTES = MIB
GZIP_WINDOW = 16 + zlib.MAX_WBITS
FREE_MEMBERS = 1000
MEMBER_BYTES = 1000
"""Every member takes a new decompressor, and needs 20 bytes: past the free ones their size on average is to be worth it."""


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Whole lines, each but perhaps the last with its newline; `first_line` is the number of the first."""

    first_line: int
    text: bytes


class LineBatches:
    """Cuts a body into batches of lines as it comes in."""

    def __init__(self, limits: IntakeLimits, *, gzipped: bool) -> None:
        self._limits = limits
        self._gzip = _Gunzip(limits) if gzipped else None
        self._pending = bytearray()
        self._searched = 0
        self._cut = 0
        self._line = 1
        self._bytes = 0

    def feed(self, chunk: bytes) -> Iterator[LineBatch]:
        """The batches that `chunk` completes.

        Raises:
            DatasetRefused: a line or the body is too long, or the gzip stream is broken or unpacks to too much.
        """
        for text in self._gzip.feed(chunk) if self._gzip else (chunk,):
            yield from self._take(text)

    def finish(self) -> Iterator[LineBatch]:
        """The last batch, once the body is at its end; its last line needs no newline."""
        if self._gzip:
            self._gzip.finish()
        if self._pending:
            yield LineBatch(self._line, bytes(self._pending))

    def _take(self, text: bytes) -> Iterator[LineBatch]:
        self._bytes += len(text)
        if self._bytes > self._limits.body_bytes:
            raise DatasetRefused(
                f"the body has more than {self._limits.body_bytes} bytes unpacked; split it into several datasets"
            )
        self._pending += text
        newline = self._pending.rfind(b"\n", self._searched)
        if newline >= 0:
            self._cut = newline + 1
        self._searched = len(self._pending)
        is_too_long = len(self._pending) - self._cut > self._limits.line_bytes
        if self._cut and (is_too_long or len(self._pending) >= BATCH_BYTES):
            batch = LineBatch(self._line, bytes(self._pending[: self._cut]))
            del self._pending[: self._cut]
            self._searched -= self._cut
            self._cut = 0
            self._line += batch.text.count(b"\n")
            yield batch
        if is_too_long:
            raise too_long(self._line, self._limits)


def too_long(line: int, limits: IntakeLimits) -> DatasetRefused:
    return DatasetRefused(
        f"the line is longer than {limits.line_bytes} bytes; a sample is one object on a line of its own, ended by a newline",
        line=line,
    )


class _Gunzip:
    """Unpacks gzip members one after the other, at most a batch at a time, and gives up on a bomb as soon as it shows."""

    def __init__(self, limits: IntakeLimits) -> None:
        self._limits = limits
        self._member = zlib.decompressobj(GZIP_WINDOW)
        self._members = 1
        self._taken = 0
        self._given = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        self._taken += len(chunk)
        while chunk:
            if self._member.eof:
                # Padding of zeros after the last member is allowed, as gunzip does.
                chunk = chunk.lstrip(b"\0")
                if not chunk:
                    return
                self._member = zlib.decompressobj(GZIP_WINDOW)
                self._members += 1
                if self._members > FREE_MEMBERS + self._taken // MEMBER_BYTES:
                    raise DatasetRefused(
                        f"the gzip stream has more than {self._members - 1} members in {self._taken} bytes; pack the body as one"
                    )
            try:
                text = self._member.decompress(chunk, BATCH_BYTES)
            except zlib.error as error:
                raise DatasetRefused(f"the body is not a gzip stream ({error}); send it as it is, or pack it anew") from error
            chunk = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            self._given += len(text)
            if self._given > max(self._limits.ratio_from_bytes, self._limits.gzip_ratio * self._taken):
                raise DatasetRefused(
                    f"the gzip stream unpacks to more than {self._limits.gzip_ratio} times its size; send the body unpacked"
                )
            if text:
                yield text

    def finish(self) -> None:
        if not self._member.eof:
            raise DatasetRefused("the gzip stream ends before its end; it was cut off on the way, send it again")
