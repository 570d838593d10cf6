"""The optional prefix cache: keys and values of earlier sequences, for the prompts that begin as they did.

It gives what SGLang's radix cache gives (the longest common prefix, apart by `extra_key`), by a plain search: a laptop's worth
of sequences needs no tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray
from transformers import DynamicCache

_Key = tuple[str | None, bytes]


class PrefixCache:
    """Keeps the most recently used sequences, at most `max_tokens` tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[_Key, tuple[NDArray[np.int32], DynamicCache]] = OrderedDict()

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids, _ in self._kept.values())

    def longest(self, extra_key: str | None, token_ids: Sequence[int]) -> tuple[int, DynamicCache]:
        """The length of the longest kept prefix of a prompt and a cache of its own that holds it: at most all but one token,
        because the last one must run to give an answer."""
        wanted = np.asarray(token_ids[:-1], np.int32)
        best, length = None, 0
        for key, (ids, _) in self._kept.items():
            if key[0] == extra_key and (common := _common_prefix(ids, wanted)) > length:
                best, length = key, common
        if best is None:
            return 0, DynamicCache()
        self._kept.move_to_end(best)
        ids, kept = self._kept[best]
        cache = deepcopy(kept)
        if len(ids) > length:
            cache.crop(length - len(ids))
        return length, cache

    def keep(self, extra_key: str | None, token_ids: Sequence[int], cache: DynamicCache) -> None:
        """Keep a sequence whose keys and values `cache` holds, exactly those. The cache may grow on: a copy is kept."""
        ids = np.asarray(token_ids, np.int32)
        for key in [k for k, (kept, _) in self._kept.items() if k[0] == extra_key and _common_prefix(kept, ids) == len(kept)]:
            del self._kept[key]
        self._kept[extra_key, ids.tobytes()] = ids, deepcopy(cache)
        while self.tokens > self._max_tokens:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
