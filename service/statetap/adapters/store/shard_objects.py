"""One pass over a shard object to be: each window is hashed, written, and dropped from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    Hashed first: that reads the pages in by the kernel's quicker way. Then the disk takes them from the page tables as they are,
    or a copy is made of them while they are in the core's cache.
    """
    for window in compressed_windows(plan, mappings) if plan.compression is Compression.ZSTD else plan.windows():
        check()
        for buffers in _in_blocks(window, file.most_bytes):
            for buffer in buffers:
                hasher.update(buffer)
            file.write(buffers)
        if mappings is not None:
            mappings.drop(window)
    return file.finish()


def _in_blocks(window: Sequence[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """The window's buffers, cut so that those of a block are `most_bytes` or less."""
    block: list[memoryview] = []
    room = most_bytes
    for buffer in window:
        start = 0
        while start < len(buffer):
            block.append(buffer[start : start + room])
            start += len(block[-1])
            room -= len(block[-1])
            if not room:
                yield block
                block, room = [], most_bytes
    if block:
        yield block
