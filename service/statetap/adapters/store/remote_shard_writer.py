"""Writes units to an object store: the same bytes as to a disk, each shard object put together in memory and sent in one PUT.

The PUT refuses to replace, so an object has its name at once, and whole. Whatever fails, what this attempt made is removed again.
What is in memory at a time is one shard for each thread that writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.memory_file import MemoryFile
from statetap.adapters.store.objects import remote_objects_at
from statetap.adapters.store.sent_object import SentObject
from statetap.adapters.store.shard_assembly import ShardPlan, plan_shards, shard_keys
from statetap.adapters.store.shard_objects import write_object
from statetap.adapters.store.unit_attempts import UnitAttempt, UnitThreads
from statetap.core.placement import Geometry
from statetap.core.records import ShardObject
from statetap.core.spec import HiddenArray
from statetap.ports import StoreError, UnitWrite

if TYPE_CHECKING:
    from statetap.adapters.store.remote_objects import RemoteObjects


class RemoteShardWriter:
    """The ShardWriter of object stores. `parallel` is how many large shards are written, and so in memory, at the same time."""

    def __init__(self, *, parallel: int = 2) -> None:
        self._objects_at = lru_cache(maxsize=16)(remote_objects_at)
        self._threads = UnitThreads(parallel)

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        """Shards without any segment get no object. If the caller is cancelled, the attempt is undone before this returns.

        Raises:
            StoreError: an object with other bytes is there, or the object store failed.
        """
        try:
            return await self._threads.write(_Attempt(self._objects_at(unit.location), plan_shards(unit)))
        finally:
            # The error's traceback leads here, and from here nothing may lead to the dumps: see `UnitAttempt.run`.
            del unit

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        keys = shard_keys(arrays, geometry, row_start, rows)
        await self._threads.run(lambda: _discard(self._objects_at(location), keys))

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.close()


class _Attempt(UnitAttempt):
    """One try at writing a unit."""

    def __init__(self, objects: RemoteObjects, plans: Sequence[ShardPlan]) -> None:
        super().__init__(str(objects), plans)
        self._objects = objects
        # Of these it is known that no earlier attempt made them.
        self._made: list[SentObject] = []
        # Of these it was not answered whether they were made.
        self._unanswered: list[SentObject] = []

    def _write(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        file = MemoryFile(plan.nbytes)
        nbytes = write_object(plan, file, mappings, self._check)
        sent = SentObject.of(plan.key, file.data)
        self._check()
        self._publish(sent, file.data)
        return ShardObject(key=plan.key, nbytes=nbytes)

    def _publish_all(self, objects: Sequence[ShardObject]) -> None:
        """Each has had its name since it was written."""

    def _publish(self, sent: SentObject, data: memoryview) -> None:
        """Make the object, or adopt the same bytes."""
        with self._objects.failing(f"writing {sent.key} of"):
            if self._is_made(sent, data):
                self._made.append(sent)
            elif not self._objects.holds(sent):
                raise StoreError(
                    f"{self._objects}/{sent.key} is there already, with other bytes, or just went away: "
                    "a leftover of an unfinished attempt; discard the unit first"
                )

    def _is_made(self, sent: SentObject, data: memoryview) -> bool:
        """Whether the object is new. A failure after which it is there with its bytes is none: the answer was lost."""
        self._unanswered.append(sent)
        try:
            made = self._objects.create(sent.key, data)
        except Exception:
            with suppress(Exception):
                if self._objects.holds(sent):
                    self._unanswered.remove(sent)
                    return True
            raise
        self._unanswered.remove(sent)
        return made

    def _undo(self) -> None:
        for sent in self._made:
            with suppress(Exception):
                self._objects.delete(sent.key)
        for sent in self._unanswered:
            with suppress(Exception):
                if self._objects.holds(sent):
                    self._objects.delete(sent.key)


def _discard(objects: RemoteObjects, keys: Sequence[str]) -> None:
    with objects.failing("discarding a unit of"):
        for key in keys:
            objects.delete(key)
