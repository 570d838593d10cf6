"""One pass over a shard object to be: each window is written, and dropped from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from statetap.adapters.store.compressed_chunks import compressed_windows
from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.object_files import ObjectFile
from statetap.adapters.store.shard_assembly import ShardPlan
from statetap.core.spec import Compression

# What Linux maps around a page that is touched, by default.
_FAULT_AROUND_BYTES = 64 << 10


def write_object(
    plan: ShardPlan, file: ObjectFile, mappings: SharedMappings | None, check: Callable[[], None] = lambda: None
) -> int:
    """Fill `file` with the object's bytes, and finish it. Returns how many they are.

    `check` may raise, window by window.

    Without `mappings` the pages of the dumps stay in memory until they are unmapped.
    """
    for window in compressed_windows(plan, mappings) if plan.compression is Compression.ZSTD else plan.windows():
        check()
        _map(window)
        file.write(window)
        if mappings is not None:
            mappings.drop(window)
    return file.finish()


def _map(window: Sequence[memoryview]) -> None:
    """See that the window's pages are mapped: those that the kernel has to fetch come alone, at up to twice the price."""
    for buffer in window:
        if len(buffer) >= _FAULT_AROUND_BYTES:
            np.frombuffer(buffer, np.uint8)[::_FAULT_AROUND_BYTES].max()
