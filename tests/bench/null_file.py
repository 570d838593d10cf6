"""A disk that takes no time, so that what the CPU alone allows is seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from statetap.adapters.store.object_files import ObjectFile

# What Linux maps around a page that is touched.
MAPPED_AROUND_BYTES = 1 << 16


class NullFile(ObjectFile):
    """Maps the pages of what it is given, as a disk that reads them would have it, and drops them."""

    def __init__(self) -> None:
        self._position = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[::MAPPED_AROUND_BYTES].max(initial=0)
            self._position += len(buffer)

    def finish(self) -> int:
        return self._position

    def close(self) -> None: ...
