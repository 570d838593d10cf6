"""The samples of a unit that wait for their capture when it is leased: where they lie, and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from statetap.core.records import SampleRecord, SampleStatus
from statetap.core.reservation import unit_dump_bytes
from statetap.core.spec import HiddenArray
from statetap.ports import OpenDataset


class UnitSamples:
    """Those of `samples` that are pending: their `lengths` in tokens and `row_starts` in the store, by index in the dataset."""

    def __init__(self, samples: Iterable[SampleRecord], dataset: OpenDataset) -> None:
        pending = [sample for sample in samples if sample.status is SampleStatus.PENDING]
        self.lengths = {sample.sample: sample.length for sample in pending}
        self.row_starts = {sample.sample: sample.row_start for sample in pending}
        self._tokens = {index: dataset.input_ids(index)[:length] for index, length in self.lengths.items()}
        self._extremes: dict[int, tuple[int, int]] = {}
        self._dump_bytes: dict[int | None, int] = {}

    def dump_bytes(self, arrays: Sequence[HiddenArray], chunk: int | None) -> int:
        """What all their dumps may take, of passes of `chunk` rows at most. Each sample that waits asks for it."""
        if chunk not in self._dump_bytes:
            self._dump_bytes[chunk] = unit_dump_bytes(self.lengths.values(), arrays, chunk)
        return self._dump_bytes[chunk]

    def tokens(self, sample: int) -> NDArray[np.int32]:
        """`[length]`."""
        return self._tokens[sample]

    def token_bytes(self) -> dict[int, bytes]:
        """Every sample's token ids as dumps carry them: int32, little-endian."""
        return {index: tokens.astype("<i4", copy=False).tobytes() for index, tokens in self._tokens.items()}

    def outside(self, vocab_size: int, sample: int) -> int | None:
        """A token id of the sample that such a vocabulary does not have, None if there is none. Looked for once."""
        if sample not in self._extremes:
            tokens = self._tokens[sample]
            self._extremes[sample] = int(tokens.min()), int(tokens.max())
        least, most = self._extremes[sample]
        return least if least < 0 else most if most >= vocab_size else None
