"""A store's samples as a map-style data set for torch's DataLoader.

    loader = DataLoader(StoredSamples("/data/run.zarr"), batch_size=None, shuffle=True, num_workers=2)

Worker processes may be forked or spawned. What a worker reads goes to the trainer in shared memory, without another copy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from statetap_client.reader import StoreReader
from statetap_client.samples import Sample

if TYPE_CHECKING:
    import torch


class StoredSamples:
    """The stored samples of a store, in dataset order: item i is the i-th of them, as `StoreReader.sample` gives it."""

    def __init__(self, store: StoreReader | str | os.PathLike[str]) -> None:
        self.reader = store if isinstance(store, StoreReader) else StoreReader(store)
        self.indexes = self.reader.stored
        # Read here, and not once in every worker.
        _ = self.reader.ids

    def __len__(self) -> int:
        return len(self.indexes)

    def __getitem__(self, item: int) -> Sample[torch.Tensor]:
        return self.reader.sample(int(self.indexes[item]))
