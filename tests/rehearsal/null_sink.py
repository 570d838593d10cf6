"""`python -m tests.rehearsal.null_sink --config FILE --every N`: the service, which assembles shards and drops them.

Each is published under its name and with its size, but is one hole. Those that `kept` names are written as always.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from statetap import main as service
from statetap.adapters.store import object_files
from statetap.adapters.store.object_files import ObjectFile, WriteWay
from statetap.settings import load_settings

from tests.bench.null_file import NullFile


def kept(shard: int, every: int) -> bool:
    """Whether a shard's bytes are kept, to be read back. Two in a row, since long samples lie in two."""
    return shard % every < 2


class HollowFile(NullFile):
    """A file that is open for writing, which gets its size and nothing else."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def finish(self) -> int:
        nbytes = super().finish()
        os.ftruncate(self._descriptor, nbytes)
        return nbytes

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
        return HollowFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

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
