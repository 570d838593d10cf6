"""The prompts that an examination sends: random ordinary token ids, and the plan by which a short prompt is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statetap.core.strict import SHORTEST_FENCE

PROMPT_TOKENS = 128
SHORTEST_PROMPT = SHORTEST_FENCE + 1
# An answer's tokens count towards the context, and a prompt that fills it is refused.
ROOM_TO_ANSWER = 8
LONGEST_FILLER = 4_096
MOST_TOKENS = 32_768
# A probe is a fraction of the budget: other dumps may be there.
BUDGET_SHARE = 4

TokenIds = NDArray[np.int32]


def random_prompt(random: np.random.Generator, length: int, vocab_size: int) -> TokenIds:
    """Ids from the middle half of the vocabulary: special tokens stand at its ends, and one id outside kills a server."""
    return random.integers(vocab_size // 4, max(vocab_size // 4 + 1, vocab_size * 3 // 4), length, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Room:
    """What one worker's prompts must keep within: all in tokens, None where there is no limit or none is known."""

    chunk: int | None
    context: int | None
    budget: int
    pool: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """The length of a prompt that is run in one pass; 0 if there is no room for one."""
        limits = [PROMPT_TOKENS, self.budget // BUDGET_SHARE]
        limits += [] if self.chunk is None else [self.chunk]
        limits += [] if self.context is None else [self.context - ROOM_TO_ANSWER]
        length = min(limits)
        return length if length >= SHORTEST_PROMPT else 0

    @property
    def longest_prompt(self) -> int:
        """The longest prompt to send, in however many passes."""
        limits = [MOST_TOKENS, self.budget // BUDGET_SHARE]
        limits += [] if self.context is None else [self.context - ROOM_TO_ANSWER]
        return min(limits)


def fillers(room: Room, prompt_length: int, page: int) -> Sequence[int] | str:
    """Lengths of prompts to send before one of `prompt_length`, so that it does not fit the rest of the first chunk.

    A scheduler fills a pass up to the chunk size with the prompts of a request in order, and splits the last one at a multiple of
    its page size. Returns the reason instead where that cannot be tried.
    """
    if room.chunk is None:
        return "prompts are never split"
    split = max(page, prompt_length // 2 // page * page)
    total = room.chunk - split
    if split >= prompt_length or total < 0:
        return f"pages of {page} tokens leave no place to split a prompt of {prompt_length}"
    longest = LONGEST_FILLER if room.context is None else min(LONGEST_FILLER, room.context - ROOM_TO_ANSWER)
    longest = longest // page * page
    needed = total + prompt_length
    most = min(MOST_TOKENS, room.budget // BUDGET_SHARE, *(() if room.pool is None else (room.pool,)))
    if needed > most or longest < page:
        return f"to split a prompt takes a request of {needed:,} tokens, and there is room for {most:,}"
    whole, rest = divmod(total, longest)
    return [longest] * whole + ([rest] if rest else [])
