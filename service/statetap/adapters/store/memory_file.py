"""An object that is put together in memory, because it is sent in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class MemoryFile:
    """The ObjectFile of what is sent. It begins with room for `nbytes`, and takes more where that is not enough."""

    def __init__(self, nbytes: int) -> None:
        # Pages that are not written to take no memory.
        self._bytes = np.empty(nbytes, np.uint8)
        self._position = 0

    @property
    def data(self) -> memoryview:
        """What was written so far."""
        return self._bytes[: self._position].data

    def write(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            end = self._position + len(buffer)
            if end > len(self._bytes):
                larger = np.empty(end + len(self._bytes) // 2, np.uint8)
                larger[: self._position] = self._bytes[: self._position]
                self._bytes = larger
            # By numpy, which lets other threads run meanwhile.
            self._bytes[self._position : end] = np.frombuffer(buffer, np.uint8)
            self._position = end

    def finish(self) -> int:
        return self._position

    def close(self) -> None:
        """It goes with whoever holds it."""
