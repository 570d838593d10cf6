"""The shard writer of the service: to a disk or to an object store, as the unit's location says."""

from __future__ import annotations

from collections.abc import Sequence

from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.locations import is_remote
from statetap.adapters.store.remote_shard_writer import RemoteShardWriter
from statetap.core.placement import Geometry
from statetap.core.records import ShardObject
from statetap.core.spec import HiddenArray
from statetap.ports import ShardWriter, UnitWrite


class ShardWriters:
    """A ShardWriter for every location; `parallel` is for either kind of place."""

    def __init__(self, *, parallel: int) -> None:
        self._local = LocalShardWriter(parallel=parallel)
        self._remote = RemoteShardWriter(parallel=parallel)

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        try:
            return await self._of(unit.location).write(unit)
        finally:
            # As in the writers: an error's traceback must not lead to the dumps.
            del unit

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        await self._of(location).discard(location, arrays, geometry, row_start, rows)

    def close(self) -> None:
        self._local.close()
        self._remote.close()

    def _of(self, location: str) -> ShardWriter:
        return self._remote if is_remote(location) else self._local
