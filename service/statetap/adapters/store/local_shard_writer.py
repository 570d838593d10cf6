"""Writes units to a local file system: every shard object by hand, from the dumps' memory.

Two phases: first all objects of the unit under temporary names, fsynced; then each gets its final name by `link`, which never
replaces. A temporary name starts with a dot and carries the fence, next to the final one: `c/7/0/.0.<fence>.partial`. Whatever
fails, what this attempt made is removed again. The work runs in a few threads; none holds a copy of any payload, but of a window
where that is the faster way, and of a chunk where chunks are compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from statetap.adapters.store import object_files
from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.durable_files import as_store_error, fsync_directory, make_directories, publish
from statetap.adapters.store.locations import local_path
from statetap.adapters.store.object_files import WINDOW_BYTES, WriteWay
from statetap.adapters.store.shard_assembly import ShardPlan, plan_shards, shard_keys
from statetap.adapters.store.shard_objects import write_object
from statetap.adapters.store.unit_attempts import UnitAttempt, UnitThreads
from statetap.adapters.store.write_ways import ways
from statetap.core.placement import Geometry
from statetap.core.records import ShardObject
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import StoreError, UnitWrite


class LocalShardWriter:
    """The ShardWriter of local paths. `parallel` is how many units are written at a time, and how many shards of large ones.

    `way` says how to write below a directory.
    """

    def __init__(self, *, parallel: int = 2, way: Callable[[Path], WriteWay] = ways.of) -> None:
        self._way = way
        self._threads = UnitThreads(parallel)

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        """Shards without any segment get no object. If the caller is cancelled, the attempt is undone before this returns.

        Raises:
            StoreFull: no space left.
            StoreError: an object with other bytes is there, or the file system failed.
        """
        root = local_path(unit.location)
        try:
            return await self._threads.write(_Attempt(root, unit.fence, plan_shards(unit), self._way))
        finally:
            # The error's traceback leads here, and from here nothing may lead to the dumps: see `UnitAttempt.run`.
            del unit

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        root, keys = local_path(location), shard_keys(arrays, geometry, row_start, rows)
        await self._threads.run(lambda: _discard(root, keys))

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.close()


class _Attempt(UnitAttempt):
    """One try at writing a unit."""

    def __init__(self, root: Path, fence: int, plans: Sequence[ShardPlan], way: Callable[[Path], WriteWay]) -> None:
        super().__init__(str(root), plans)
        self._root = root
        self._fence = fence
        self._way = way
        self._published: list[Path] = []

    def _publish_all(self, objects: Sequence[ShardObject]) -> None:
        for written in objects:
            self._check()
            self._publish(written)

    def _write(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        try:
            return self._write_temporary(plan, mappings)
        except OSError as e:
            raise as_store_error(e, f"writing {self._root / plan.key}") from e

    def _write_temporary(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        temporary = self._temporary(plan.key)
        make_directories(temporary.parent)
        # A fence is held once: a file of this name is what a killed process left.
        temporary.unlink(missing_ok=True)
        # How large it will be compressed is not known: then no space is an error in its middle.
        expected = plan.nbytes if plan.compression is Compression.NONE else 0
        file = object_files.create(temporary, expected, self._way(temporary.parent))
        try:
            nbytes = write_object(plan, file, mappings, self._check)
        finally:
            file.close()
        return ShardObject(key=plan.key, nbytes=nbytes)

    def _publish(self, written: ShardObject) -> None:
        """Give the object its name, or adopt the same bytes. Durable afterwards, its directories included."""
        final, temporary = self._root / written.key, self._temporary(written.key)
        try:
            try:
                publish(temporary, final)
                self._published.append(final)
            except FileExistsError:
                if not _are_same(temporary, final):
                    raise StoreError(
                        f"{final} is there already, with other bytes: a leftover of an unfinished attempt; discard the unit first"
                    ) from None
                temporary.unlink()
            for directory in _directories(self._root, written.key):
                fsync_directory(directory)
        except OSError as e:
            raise as_store_error(e, f"publishing {final}") from e

    def _temporary(self, key: str) -> Path:
        final = self._root / key
        return final.with_name(f".{final.name}.{self._fence}.partial")

    def _undo(self) -> None:
        for path in (*self._published, *(self._temporary(plan.key) for plan in self._plans)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for plan in self._plans:
            _remove_empty_directories(self._root, plan.key)


def _are_same(path: Path, other: Path) -> bool:
    if path.stat().st_size != other.stat().st_size:
        return False
    with path.open("rb") as file, other.open("rb") as theirs:
        while window := file.read(WINDOW_BYTES):
            if window != theirs.read(WINDOW_BYTES):
                return False
    return True


def _discard(root: Path, keys: Sequence[str]) -> None:
    for key in keys:
        final = root / key
        if not final.parent.is_dir():
            continue
        try:
            for path in (final, *final.parent.glob(f".{final.name}.*.partial")):
                path.unlink(missing_ok=True)
            fsync_directory(final.parent)
        except OSError as e:
            raise as_store_error(e, f"discarding {final}") from e
        _remove_empty_directories(root, key)


def _directories(root: Path, key: str) -> list[Path]:
    """The directories from an object's own up to its array's `c`, innermost first."""
    parts = key.split("/")
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) - 1, 1, -1)]


def _remove_empty_directories(root: Path, key: str) -> None:
    # Not `c`: writers of other shards are about to use it.
    for directory in _directories(root, key)[:-1]:
        with suppress(OSError):
            directory.rmdir()
