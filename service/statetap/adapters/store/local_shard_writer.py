"""Writes units to a local file system: every shard object by hand, straight from the dumps' memory.

Two phases: first all objects of the unit under temporary names, fsynced; then each gets its final name by `link`, which never
replaces. A temporary name starts with a dot and carries the fence, next to the final one: `c/7/0/.0.<fence>.partial`. Whatever
fails, what this attempt made is removed again. The work runs in a few threads; it holds no copy of any payload, but for one chunk
a thread where chunks are compressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import xxhash
from statetap_client import layout

from statetap.adapters.store import object_files
from statetap.adapters.store.direct_io import Alignment, SharedMappings
from statetap.adapters.store.durable_files import as_store_error, fsync_directory, make_directories, publish
from statetap.adapters.store.locations import local_path
from statetap.adapters.store.object_files import WINDOW_BYTES
from statetap.adapters.store.shard_assembly import ShardPlan, plan_shards
from statetap.adapters.store.shard_objects import write_object
from statetap.adapters.store.write_ways import ways
from statetap.core.placement import Geometry
from statetap.core.records import ShardObject
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import StoreError, UnitWrite

T = TypeVar("T")


class LocalShardWriter:
    """The ShardWriter of local paths. `parallel` is how many shards are written at the same time, in as many units at most.

    `way` says how to write below a directory: by O_DIRECT with that alignment, or (None) through the page cache.
    """

    def __init__(self, *, parallel: int = 2, way: Callable[[Path], Alignment | None] = ways.of) -> None:
        self._way = way
        self._units = ThreadPoolExecutor(parallel, thread_name_prefix="unit-writer")
        self._shards = ThreadPoolExecutor(parallel, thread_name_prefix="shard-writer")

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        """Shards without any segment get no object. If the caller is cancelled, the attempt is undone before this returns.

        Raises:
            StoreFull: no space left.
            StoreError: an object with other bytes is there, or the file system failed.
        """
        root = local_path(unit.location)
        attempt = _Attempt(root, unit.fence, plan_shards(unit), self._way)
        outcome = await self._run(partial(attempt.run, self._shards), attempt.abandoned)
        try:
            if isinstance(outcome, StoreError):
                raise outcome
            return outcome
        finally:
            # The error's traceback leads here, and from here nothing may lead to the dumps: see `_Attempt.run`.
            del outcome, attempt, unit

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        root = local_path(location)
        shards = layout.shards_of(row_start, rows, geometry.rows_per_shard)
        keys = [layout.shard_key(array.name, shard, array.row_shape) for array in arrays for shard in shards]
        await self._run(lambda: _discard(root, keys))

    def close(self) -> None:
        """Wait for the threads to end."""
        self._units.shutdown()
        self._shards.shutdown()

    async def _run(self, work: Callable[[], T], abandoned: Event | None = None) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._units, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if abandoned is not None:
                abandoned.set()
            # The thread still reads the dumps' memory: the caller may only let go of it once the thread has ended.
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            # Looked at, so that nobody complains of an exception that was never retrieved.
            future.exception()
            raise


class _AbandonedError(StoreError):
    """The caller is gone, or another object of the unit failed."""


class _Attempt:
    """One try at writing a unit."""

    def __init__(self, root: Path, fence: int, plans: Sequence[ShardPlan], way: Callable[[Path], Alignment | None]) -> None:
        self.abandoned = Event()
        self._root = root
        self._fence = fence
        self._plans = plans
        self._way = way
        self._published: list[Path] = []

    def run(self, shards: Executor) -> tuple[ShardObject, ...] | StoreError:
        """Write, each object in a thread of `shards`, then publish. Why not, if it failed.

        Such an error comes without a traceback, which would lead to this attempt: in a circle with whoever holds the error, that
        keeps the dumps mapped until garbage is collected.
        """
        try:
            objects = self._write_all(shards)
            for written in objects:
                self._check()
                self._publish(written)
            self._check()
        except StoreError as error:
            self._undo()
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except BaseException:
            self._undo()
            raise
        return objects

    def _write_all(self, shards: Executor) -> tuple[ShardObject, ...]:
        # To find the mappings takes longer than to write what is smaller than a window.
        large = sum(plan.nbytes for plan in self._plans) > WINDOW_BYTES
        mappings = SharedMappings(piece.data for plan in self._plans for piece in plan.pieces) if large else None
        futures = [shards.submit(self._write, plan, mappings) for plan in self._plans]
        try:
            wait(futures)
            failures = [error for future in futures if (error := future.exception()) is not None]
            if failures:
                # The first that was not told to stop by another.
                raise min(failures, key=lambda error: isinstance(error, _AbandonedError))
            return tuple(future.result() for future in futures)
        finally:
            futures, failures = [], []  # which hold the error

    def _write(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        try:
            return self._write_temporary(plan, mappings)
        except OSError as e:
            self.abandoned.set()
            raise as_store_error(e, f"writing {self._root / plan.key}") from e
        except BaseException:
            self.abandoned.set()
            raise

    def _write_temporary(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        self._check()
        temporary = self._temporary(plan.key)
        make_directories(temporary.parent)
        # A fence is held once: a file of this name is what a killed process left.
        temporary.unlink(missing_ok=True)
        hasher = xxhash.xxh3_64(seed=0)
        # How large it will be compressed is not known: then no space is an error in its middle.
        expected = plan.nbytes if plan.compression is Compression.NONE else 0
        file = object_files.create(temporary, expected, self._way(temporary.parent))
        try:
            nbytes = write_object(plan, file, hasher, mappings, self._check)
        finally:
            file.close()
        return ShardObject(key=plan.key, nbytes=nbytes, digest=hasher.intdigest())

    def _check(self) -> None:
        if self.abandoned.is_set():
            raise _AbandonedError(f"writing a unit to {self._root} was abandoned")

    def _publish(self, written: ShardObject) -> None:
        """Give the object its name, or adopt the same bytes. Durable afterwards, its directories included."""
        final, temporary = self._root / written.key, self._temporary(written.key)
        try:
            try:
                publish(temporary, final)
                self._published.append(final)
            except FileExistsError:
                if not _is_same(final, written):
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


def _is_same(path: Path, written: ShardObject) -> bool:
    if path.stat().st_size != written.nbytes:
        return False
    hasher = xxhash.xxh3_64(seed=0)
    with path.open("rb") as file:
        while window := file.read(WINDOW_BYTES):
            hasher.update(window)
    return hasher.intdigest() == written.digest


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
