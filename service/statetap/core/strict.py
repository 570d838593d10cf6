"""Strict mode: what makes matching by token count safe enough to use, and where it must refuse.

Guards: never two samples of equal length in a row; samples of 1 token are refused (a decode pass looks the same); after anything
that may leave a dump behind (start, time-out, error) a fence request, of a length of its own, must appear before work goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from statetap.core.capture import chunk_pattern

SHORTEST_SAMPLE = 2
# Lengths that servers use for requests of their own: health checks (1 token), warm-up (3 without a tokenizer, 6 with one).
SERVER_LENGTHS = frozenset({1, 3, 6})
SHORTEST_FENCE = 7


def next_length(pending: Iterable[int], previous: int | None) -> int | None:
    """Of the pending lengths, the first that may follow a sample of `previous` rows; None if only equal ones are left."""
    return next((length for length in pending if length != previous), None)


def fence_length(avoid: Collection[int], chunk: int | None) -> int:
    """A length that no request in `avoid`, and no chunk of one, has, and that a single pass publishes.

    Raises:
        ValueError: the chunk size leaves no such length.
    """
    taken = SERVER_LENGTHS.union(*(chunk_pattern(length, chunk) for length in avoid))
    length = SHORTEST_FENCE
    while length in taken:
        length += 1
    if chunk is not None and length >= chunk:
        raise ValueError(
            f"strict mode cannot fence this worker: no free length below its chunk size of {chunk} tokens; use a larger one"
        )
    return length


def fence_tokens(length: int, vocab_size: int) -> list[int]:
    """Token ids for a fence request: valid in any vocabulary, and told from other fences by their length."""
    return [index % min(vocab_size, 16) for index in range(length)]
