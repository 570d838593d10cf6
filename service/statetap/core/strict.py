"""Strict mode: what makes matching by token count safe enough to use, and where it must refuse.

Guards: never two samples of equal length in a row; samples of 1 token are refused (a decode pass looks the same); after anything
that may leave a dump behind (start, time-out, error) a fence request, of a length of its own, must appear before work goes on.
"""

from __future__ import annotations

from collections.abc import Collection

from statetap.core.capture import chunk_pattern

SHORTEST_SAMPLE = 2
# Lengths that servers use for requests of their own: health checks (1 token), warm-up (3 without a tokenizer, 6 with one).
SERVER_LENGTHS = frozenset({1, 3, 6})
SHORTEST_FENCE = 7


def tells_itself_apart(length: int, chunk: int | None) -> bool:
    """Whether a sample of this length publishes no dump of a single row, as decode passes and health checks do."""
    return chunk_pattern(length, chunk)[-1] >= SHORTEST_SAMPLE


def fence_length(avoid: Collection[int], chunk: int | None, first: int = SHORTEST_FENCE) -> int:
    """A length, from `first` on, that no request in `avoid`, and no chunk of one, has, and that a single pass publishes.

    Raises:
        ValueError: the chunk size leaves no such length.
    """
    taken = SERVER_LENGTHS.union(*(chunk_pattern(length, chunk) for length in avoid))
    end = max(*taken, first) + 2 if chunk is None else chunk
    candidates: list[int] = [*range(first, end), *range(SHORTEST_FENCE, min(first, end))]
    free = [length for length in candidates if length not in taken]
    if not free:
        raise ValueError(f"strict mode cannot fence this worker: no length below its chunk size of {chunk} tokens is free")
    return free[0]


def fence_tokens(length: int, vocab_size: int) -> list[int]:
    """Token ids for a fence request: valid in any vocabulary, and told from other fences by their length."""
    return [index % min(vocab_size, 16) for index in range(length)]


class StrictGate:
    """What may be sent to one worker next. `chunk` is its declared chunk size in tokens, None if it never splits a prompt.

    It knows the lengths that may still be unaccounted for: of requests that failed, and of fences that did not appear.
    `first_fence` is where its fences' lengths begin: workers that differ in it are not taken for each other.
    """

    def __init__(self, chunk: int | None, first_fence: int = SHORTEST_FENCE) -> None:
        self.chunk = chunk
        self._first_fence = first_fence
        self.awaited: int | None = None
        """The rows of the fence that is under way."""
        self._previous: int | None = None
        self._unaccounted: set[int] = set()
        self._fenced = False
        self._failed_fence: int | None = None

    @property
    def is_fenced(self) -> bool:
        """Whether a fence has appeared, and nothing has been in doubt since."""
        return self._fenced

    def may_send(self, length: int) -> bool:
        """Whether a sample of this length may be sent now; if none of those that wait may, a fence must come first."""
        return self._fenced and length != self._previous and length not in self._unaccounted

    def sent(self, length: int) -> None:
        self._previous = length

    def doubt(self, length: int) -> None:
        """An attempt of this length failed: its dumps may still come."""
        self._unaccounted.add(length)
        self._fenced = False

    def restart(self) -> None:
        """The worker is new, or was away: nothing is known of what it still publishes."""
        self._fenced = False

    def begin_fence(self, pending: Collection[int]) -> int:
        """The length of a fence to send now, before samples of the pending lengths.

        A fence that did not appear is sent again with the same length: nothing was sent in between, so whichever of the two
        appears first, all that came before them has.

        Raises:
            ValueError: the chunk size leaves no length.
        """
        if self._failed_fence is None:
            previous = set() if self._previous is None else {self._previous}
            self.awaited = fence_length(self._unaccounted | previous | set(pending), self.chunk, self._first_fence)
        else:
            self.awaited = self._failed_fence
        return self.awaited

    def fence_failed(self) -> None:
        """It was not answered, or its dump did not appear in time; both may still come."""
        self._failed_fence, self.awaited = self.awaited, None

    def appeared(self, rows: int) -> bool:
        """A dump outside every lifecycle: whether it is the awaited fence's. Then all that came before it has appeared, too."""
        if self.awaited is None or rows != self.awaited:
            return False
        # Of a fence that was sent twice, one dump is still to come.
        self._unaccounted = set() if self._failed_fence is None else {rows}
        self._failed_fence, self._previous, self.awaited = None, rows, None
        self._fenced = True
        return True
