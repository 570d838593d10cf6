"""`python -m tests.rehearsal.null_sink --config FILE --every N`: the service, which assembles shards, hashes and drops them.

Each is published under its name and with its size, but is one hole. Those that `kept` names are written as always.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from statetap import main as service
from statetap.adapters.store import object_files
from statetap.adapters.store.object_files import WINDOW_BYTES, ObjectFile, WriteWay
from statetap.settings import load_settings


def kept(shard: int, every: int) -> bool:
    """Whether a shard's bytes are kept, to be read back. Two in a row, since long samples lie in two."""
    return shard % every < 2


class NullFile(ObjectFile):
    """A disk that takes no time: of a file that is open for writing it has the size."""

    most_bytes = WINDOW_BYTES

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        self._position += sum(len(buffer) for buffer in buffers)

    def finish(self) -> int:
        os.ftruncate(self._descriptor, self._position)
        return self._position

    def close(self) -> None:
        os.close(self._descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True, help="of so many shards two are kept")
    options = parser.parse_args()
    create = object_files.create

    def create_or_drop(path: Path, nbytes: int, way: WriteWay) -> ObjectFile:
        if kept(_shard_of(path), options.every):
            return create(path, nbytes, way)
        return NullFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    object_files.create = create_or_drop
    settings = load_settings(options.config)
    service.configure_logs(settings)
    asyncio.run(service.serve(settings))


def _shard_of(path: Path) -> int:
    """Objects are at `<array>/c/<shard>/0[/0]`."""
    parts = path.parts
    return int(parts[len(parts) - parts[::-1].index("c")])


if __name__ == "__main__":
    main()
