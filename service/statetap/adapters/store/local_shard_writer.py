"""Writes units to a local file system: every shard object by hand, straight from the dumps' memory.

Two phases: first all objects of the unit under temporary names, fsynced; then each gets its final name by `link`, which never
replaces. A temporary name starts with a dot and carries the fence, next to the final one: `c/7/0/.0.<fence>.partial`. Whatever
fails, what this attempt made is removed again. The work runs in a few threads; it holds no copy of any payload.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

import xxhash
from statetap_client import layout

from statetap.adapters.store.durable_files import (
    MAX_BUFFERS,
    as_store_error,
    fsync_directory,
    make_directories,
    publish,
    write_all,
)
from statetap.adapters.store.locations import local_path
from statetap.adapters.store.shard_assembly import WINDOW_BYTES, ShardPlan, plan_shards
from statetap.core.placement import Geometry
from statetap.core.records import ShardObject
from statetap.core.spec import HiddenArray
from statetap.ports import StoreError, UnitWrite

T = TypeVar("T")


class LocalShardWriter:
    """The ShardWriter of local paths. `parallel` is how many units are written at the same time."""

    def __init__(self, *, parallel: int = 2) -> None:
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="shard-writer")

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        """Shards without any segment get no object. If the caller is cancelled, the attempt is undone before this returns."""
        root = local_path(unit.location)
        attempt = _Attempt(root, unit.fence, plan_shards(unit))
        return await self._run(attempt.run, attempt.abandoned)

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        root = local_path(location)
        shards = layout.shards_of(row_start, rows, geometry.rows_per_shard)
        keys = [layout.shard_key(array.name, shard, array.row_shape) for array in arrays for shard in shards]
        await self._run(lambda: _discard(root, keys))

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.shutdown()

    async def _run(self, work: Callable[[], T], abandoned: Event | None = None) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
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


class _Attempt:
    """One try at writing a unit."""

    def __init__(self, root: Path, fence: int, plans: Sequence[ShardPlan]) -> None:
        self.abandoned = Event()
        self._root = root
        self._fence = fence
        self._plans = plans
        self._temporary: list[Path] = []
        self._published: list[Path] = []

    def run(self) -> tuple[ShardObject, ...]:
        """Write, then publish.

        Raises:
            StoreFull: no space left.
            StoreError: an object with other bytes is there, or the file system failed.
        """
        doing = "writing a unit"
        try:
            objects = []
            for plan in self._plans:
                doing = f"writing {self._root / plan.key}"
                objects.append(self._write_temporary(plan))
            for written, temporary in zip(objects, list(self._temporary), strict=True):
                doing = f"publishing {self._root / written.key}"
                self._publish(written, temporary)
        except OSError as e:
            self._undo()
            raise as_store_error(e, doing) from e
        except BaseException:
            self._undo()
            raise
        return tuple(objects)

    def _write_temporary(self, plan: ShardPlan) -> ShardObject:
        final = self._root / plan.key
        make_directories(final.parent)
        temporary = final.with_name(f".{final.name}.{self._fence}.partial")
        # A fence is held once: a file of this name is what a killed process left.
        temporary.unlink(missing_ok=True)
        self._temporary.append(temporary)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            nbytes, digest = self._write_payload(descriptor, plan)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return ShardObject(key=plan.key, nbytes=nbytes, digest=digest)

    def _write_payload(self, descriptor: int, plan: ShardPlan) -> tuple[int, int]:
        """Write the object window by window, each hashed while its bytes are warm. Returns its size and digest."""
        hasher = xxhash.xxh3_64(seed=0)
        nbytes = 0
        window: list[memoryview] = []
        window_bytes = 0

        def flush() -> None:
            nonlocal nbytes, window_bytes
            if self.abandoned.is_set():
                raise StoreError(f"writing {plan.key} was abandoned")
            for buffer in window:
                hasher.update(buffer)
            write_all(descriptor, window)
            nbytes += window_bytes
            window_bytes = 0
            window.clear()

        for buffer in plan.buffers():
            if len(window) == MAX_BUFFERS or window_bytes + len(buffer) > WINDOW_BYTES:
                flush()
            window.append(buffer)
            window_bytes += len(buffer)
        flush()
        return nbytes, hasher.intdigest()

    def _publish(self, written: ShardObject, temporary: Path) -> None:
        """Give the object its name, or adopt the same bytes. Durable afterwards, its directories included."""
        final = self._root / written.key
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

    def _undo(self) -> None:
        for path in (*self._published, *self._temporary):
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
