"""Looks at captures, at large ones in threads: one pass over the bytes, block by block (hash, checksums, values), and norms."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash
from statetap_client import layout

from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.object_files import WINDOW_BYTES
from statetap.adapters.store.row_norms import sampled_norms
from statetap.adapters.store.row_sums import RowSums
from statetap.adapters.store.value_checks import RowChecker
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart, CaptureReport

# What stays in a cache: what has been hashed is checked without another way to memory. Smaller blocks cost more in calls.
BLOCK_BYTES = 1 << 20
# To look at so much takes the event loop a quarter of a millisecond. To hand it to a thread and hear of it takes as long, and the
# interpreter's lock passes to and fro for it.
SMALL_BYTES = 256 << 10
SMALL_PARTS = 4


class ThreadedCaptureInspector:
    """The CaptureInspector over numpy. `parallel` large captures are looked at at the same time, small ones at once."""

    def __init__(self, *, parallel: int = 2) -> None:
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="inspector")
        self._has_looked = False

    async def inspect(self, parts: Sequence[CapturePart], arrays: Sequence[HiddenArray]) -> CaptureReport:
        """Rows in a refusal count from the capture's first row. The first fault found is reported, the digest is always whole.

        Rows that differ from their checksums are reported before any value: whatever stands there, it is not what was computed.
        """
        loop = asyncio.get_running_loop()
        if not self._has_looked and _is_small(parts):
            # Once in a turn of the loop, however many captures come in it.
            self._has_looked = True
            loop.call_soon(self._turn_over)
            return _inspect(parts, arrays)
        return await loop.run_in_executor(self._threads, _inspect, parts, arrays)

    async def digest(self, views: Mapping[str, memoryview]) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _digest, views)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.shutdown()

    def _turn_over(self) -> None:
        self._has_looked = False


def _is_small(parts: Sequence[CapturePart]) -> bool:
    return len(parts) <= SMALL_PARTS and sum(view.nbytes for part in parts for view in part.views.values()) <= SMALL_BYTES


def _inspect(parts: Sequence[CapturePart], arrays: Sequence[HiddenArray]) -> CaptureReport:
    hasher = xxhash.xxh3_64(seed=0)
    fault: str | None = None
    # To find the mappings takes longer than to look at a small capture.
    views = [view.cast("B") for part in parts for view in part.views.values()]
    mappings = SharedMappings(views) if sum(map(len, views)) > WINDOW_BYTES else None
    sums = RowSums([part.row_checksums for part in parts])
    for array in arrays:
        checker = RowChecker(array)
        block_bytes = max(1, BLOCK_BYTES // array.row_bytes) * array.row_bytes
        row = 0
        for number, part in enumerate(parts):
            data = part.views[array.name].cast("B")
            first_row = row
            held = 0
            for start in range(0, len(data), block_bytes):
                if mappings is not None and start - held >= WINDOW_BYTES:
                    # Not to hold a whole dump: what was looked at is mapped again when it is written.
                    mappings.drop([data[held:start]])
                    held = start
                block = data[start : start + block_bytes]
                hasher.update(block)
                sums.add(number, row - first_row, array, block)
                if fault is None:
                    fault = checker.fault(block, row)
                row += len(block) // array.row_bytes
            if mappings is not None:
                mappings.drop([data[held:]])
    refusal = None if fault is None else Refusal(RefusalReason.BAD_VALUES, fault)
    if (difference := sums.difference()) is not None:
        refusal = Refusal(RefusalReason.WRONG_CHECKSUM, difference)
    if refusal is not None:
        return CaptureReport(digest=hasher.intdigest(), refusal=refusal)
    norms = tuple(sampled_norms([part.views[array.name] for part in parts], array) for array in arrays)
    return CaptureReport(digest=hasher.intdigest(), refusal=None, norms=norms)


def _digest(views: Mapping[str, memoryview]) -> int:
    hasher = xxhash.xxh3_64(seed=0)
    for name in layout.HIDDEN_ARRAYS:
        if name in views:
            hasher.update(views[name].cast("B"))
    return hasher.intdigest()
