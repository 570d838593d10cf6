"""A disk that takes no time, so that what the CPU alone allows is seen."""

from __future__ import annotations

from collections.abc import Sequence

from statetap.adapters.store.object_files import ObjectFile


class NullFile(ObjectFile):
    """Counts what it is given."""

    def __init__(self) -> None:
        self._position = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        self._position += sum(map(len, buffers))

    def finish(self) -> int:
        return self._position

    def close(self) -> None: ...
