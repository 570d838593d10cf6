"""Looks at small captures at once, and hands the others to threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector, _inspect
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart, CaptureReport

# To look at so much takes about half a millisecond of the event loop. To hand it to a thread takes a third of that, and the
# interpreter's lock, which passes to and fro for it, keeps the loop waiting for as long again.
SMALL_BYTES = 256 << 10


class CaptureInspectorBySize:
    """The CaptureInspector over one that works in threads."""

    def __init__(self, threads: ThreadedCaptureInspector) -> None:
        self._threads = threads

    async def inspect(self, parts: Sequence[CapturePart], arrays: Sequence[HiddenArray]) -> CaptureReport:
        if sum(view.nbytes for part in parts for view in part.views.values()) <= SMALL_BYTES:
            return _inspect(parts, arrays)
        return await self._threads.inspect(parts, arrays)

    async def digest(self, views: Mapping[str, memoryview]) -> int:
        return await self._threads.digest(views)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.close()
