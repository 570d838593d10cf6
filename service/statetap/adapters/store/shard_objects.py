"""One pass over a shard object to be: each window is hashed, written, and dropped from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from statetap.adapters.store.compressed_chunks import compressed_windows
from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.object_files import ObjectFile
from statetap.adapters.store.shard_assembly import ShardPlan
from statetap.core.spec import Compression


class Hasher(Protocol):
    def update(self, data: memoryview, /) -> None: ...


def write_object(
    plan: ShardPlan, file: ObjectFile, hasher: Hasher, mappings: SharedMappings | None, check: Callable[[], None] = lambda: None
) -> int:
    """Fill `file` with the object's bytes, and finish it; `hasher` has seen them all then. Returns how many they are.

    `check` may raise, window by window.

    Without `mappings` the pages of the dumps stay in memory until they are unmapped.

    Hashed first: that reads the pages in by the kernel's quicker way, and the disk takes them from the page tables as they are.
    """
    for window in compressed_windows(plan, mappings) if plan.compression is Compression.ZSTD else plan.windows():
        check()
        for buffer in window:
            hasher.update(buffer)
        file.write(window)
        if mappings is not None:
            mappings.drop(window)
    return file.finish()
