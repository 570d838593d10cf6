"""A bounded ring of bytes: spans are handed out one after another and come back in about the same order.

Holds no memory itself: it says which bytes of a buffer are whose. Never waits: a span that does not fit is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Span:
    """Bytes `[start, start + nbytes)` of the ring's buffer, the holder's own until they are released."""

    start: int
    nbytes: int
    released: bool = field(default=False, repr=False)


class Ring:
    """Spans of a buffer of `capacity` bytes. A span is contiguous, so the buffer's end may stay unused once around."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._mutex = threading.Lock()
        self._spans: deque[Span] = deque()

    @property
    def held(self) -> int:
        """How many spans are not free again yet."""
        return len(self._spans)

    def reserve(self, nbytes: int) -> Span | None:
        """A span of `nbytes`, None if there is no room for it now."""
        with self._mutex:
            start = self._free_start(nbytes)
            if start is None:
                return None
            span = Span(start, nbytes)
            self._spans.append(span)
            return span

    def release(self, span: Span) -> None:
        """Give a span back. Its bytes are free once those handed out before it are, too."""
        with self._mutex:
            span.released = True
            while self._spans and self._spans[0].released:
                self._spans.popleft()
            while self._spans and self._spans[-1].released:
                self._spans.pop()

    def _free_start(self, nbytes: int) -> int | None:
        if not self._spans:
            return 0 if nbytes <= self.capacity else None
        oldest, newest = self._spans[0], self._spans[-1]
        end = newest.start + newest.nbytes
        if newest.start >= oldest.start:  # free: behind the newest, then before the oldest
            if end + nbytes <= self.capacity:
                return end
            return 0 if nbytes <= oldest.start else None
        return end if end + nbytes <= oldest.start else None
