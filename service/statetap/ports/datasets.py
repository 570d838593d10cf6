"""Tokenised samples, taken in once and read for ever after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from statetap.core.records import (
    DatasetRecord,
)


class DatasetRefused(Exception):
    """A dataset that cannot be taken: `line` is 1-based (None: the whole body), `field` the key at fault (None: the line)."""

    def __init__(self, reason: str, *, line: int | None = None, field: str | None = None) -> None:
        where = "" if line is None else f"line {line}" + ("" if field is None else f", field {field!r}") + ": "
        super().__init__(where + reason)
        self.reason = reason
        self.line = line
        self.field = field


class OpenDataset(Protocol):
    """A dataset, mapped. Indexes are dataset order."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def id(self, index: int) -> str: ...

    def ids(self, first: int, stop: int) -> list[str]:
        """Of samples `[first, stop)`."""
        ...

    def input_ids(self, index: int) -> NDArray[np.int32]: ...

    def loss_mask(self, index: int) -> NDArray[np.uint8]: ...

    def tokens(self, first: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """`input_ids` and `loss_mask` of samples `[first, stop)`, of which there is at least one, each one after the other."""
        ...


class Datasets(Protocol):
    """Takes datasets in, tokenised and checked, and keeps them in columnar files."""

    async def ingest(
        self, body: AsyncIterator[bytes], *, name: str, model: str | None, gzipped: bool, allow_empty_mask: bool
    ) -> DatasetRecord:
        """Read NDJSON to the end. DatasetRefused: nothing is kept."""
        ...

    async def ingest_path(self, path: str, *, name: str, model: str | None, allow_empty_mask: bool) -> DatasetRecord:
        """The same from a file (`.ndjson`, `.jsonl`, either with `.gz`) below a configured root; symbolic links resolved."""
        ...

    async def open(self, dataset: str) -> OpenDataset: ...

    async def delete(self, dataset: str) -> None: ...
