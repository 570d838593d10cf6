"""Are the store's tokens those of the datasets that went in? Their sha256 stands in the store's attributes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statetap_client import layout
from statetap_client.dataset_digest import sample_digest
from statetap_client.reader import StoreReader

CACHED_SHARDS = 16


@dataclass(slots=True)
class TokensReport:
    """`confirmed` datasets (sha256): every id, token and mask of theirs stands in the store as it was submitted.

    The others are `unconfirmed`: a dataset whose samples a job truncated or left out cannot be told from one that was damaged.
    """

    confirmed: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)


def verify_tokens(store: StoreReader, *, progress: Callable[[int, int], None] | None = None) -> TokensReport:
    """Recompute the datasets' sha256 from the store's ids, tokens and masks, in dataset order, whatever became of each sample."""
    report = TokensReport()
    waiting = [str(sha256) for sha256 in store.attributes["datasets"]]
    read = _reader(store)
    digest = hashlib.sha256()
    for index in range(len(store)):
        first, last = store.row_range(index)
        if first >= 0:
            digest.update(
                sample_digest(store.ids[index], read(layout.INPUT_IDS, first, last), read(layout.LOSS_MASK, first, last))
            )
        if waiting and digest.hexdigest() == waiting[0]:
            report.confirmed.append(waiting.pop(0))
            digest = hashlib.sha256()
        if progress is not None:
            progress(index + 1, len(store))
    report.unconfirmed = waiting
    return report


def _reader(store: StoreReader) -> Callable[[str, int, int], NDArray[Any]]:
    """Rows of a token array, read a shard at a time: samples follow each other, or lie anywhere in a permutation."""

    @lru_cache(CACHED_SHARDS)
    def shard(name: str, number: int) -> NDArray[Any]:
        start = number * layout.TOKEN_ROWS_PER_SHARD
        return store.token_rows(name, start, start + layout.TOKEN_ROWS_PER_SHARD)

    def read(name: str, first: int, last: int) -> NDArray[Any]:
        parts = []
        while first < last:
            number, offset = divmod(first, layout.TOKEN_ROWS_PER_SHARD)
            part = shard(name, number)[offset : offset + last - first]
            parts.append(part)
            first += len(part)
        return np.concatenate(parts)

    return read
