"""What all shard writers share: a unit's objects are made in a few threads, and an attempt that fails leaves nothing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TypeVar

from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.object_files import WINDOW_BYTES
from statetap.adapters.store.shard_assembly import ShardPlan
from statetap.core.records import ShardObject
from statetap.ports import StoreError

T = TypeVar("T")


class _AbandonedError(StoreError):
    """The caller is gone, or another object of the unit failed."""


class UnitAttempt(ABC):
    """One try at writing a unit to `place`."""

    def __init__(self, place: str, plans: Sequence[ShardPlan]) -> None:
        self.abandoned = Event()
        self._place = place
        self._plans = plans

    @abstractmethod
    def _write(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        """Write one object, in whichever thread calls. StoreError: it cannot be done."""

    @abstractmethod
    def _publish_all(self, objects: Sequence[ShardObject]) -> None:
        """See that all of the unit's objects, which were written, have their names."""

    @abstractmethod
    def _undo(self) -> None:
        """Remove what this attempt made, as far as it can be removed. Raises nothing."""

    def run(self, shards: Executor) -> tuple[ShardObject, ...] | StoreError:
        """Write, a unit of more than a window by threads of `shards`, then publish. Why not, if it failed.

        Such an error comes without a traceback, which would lead to this attempt: in a circle with whoever holds the error, that
        keeps the dumps mapped until garbage is collected.
        """
        try:
            objects = self._write_all(shards)
            self._publish_all(objects)
            self._check()
        except StoreError as error:
            self._undo()
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except BaseException:
            self._undo()
            raise
        return objects

    def _check(self) -> None:
        if self.abandoned.is_set():
            raise _AbandonedError(f"writing a unit to {self._place} was abandoned")

    def _write_all(self, shards: Executor) -> tuple[ShardObject, ...]:
        if sum(plan.nbytes for plan in self._plans) <= WINDOW_BYTES:
            # To find the mappings, and to hand objects to other threads, takes longer than to write them.
            return tuple(self._write_one(plan, None) for plan in self._plans)
        mappings = SharedMappings(piece.data for plan in self._plans for piece in plan.pieces)
        futures = [shards.submit(self._write_one, plan, mappings) for plan in self._plans]
        try:
            wait(futures)
            failures = [error for future in futures if (error := future.exception()) is not None]
            if failures:
                # The first that was not told to stop by another.
                raise min(failures, key=lambda error: isinstance(error, _AbandonedError))
            return tuple(future.result() for future in futures)
        finally:
            futures, failures = [], []  # which hold the error

    def _write_one(self, plan: ShardPlan, mappings: SharedMappings | None) -> ShardObject:
        try:
            self._check()
            return self._write(plan, mappings)
        except BaseException:
            self.abandoned.set()
            raise


class UnitThreads:
    """Threads for `parallel` units at a time, and for as many shards of the large ones among them."""

    def __init__(self, parallel: int) -> None:
        self._units = ThreadPoolExecutor(parallel, thread_name_prefix="unit-writer")
        self._shards = ThreadPoolExecutor(parallel, thread_name_prefix="shard-writer")

    async def write(self, attempt: UnitAttempt) -> tuple[ShardObject, ...]:
        """Run an attempt. If the caller is cancelled, it is undone before this returns. StoreError: it failed, and is undone."""
        outcome = await self.run(partial(attempt.run, self._shards), attempt.abandoned)
        try:
            if isinstance(outcome, StoreError):
                raise outcome
            return outcome
        finally:
            # The error's traceback leads here, and from here nothing may lead to the dumps: see `UnitAttempt.run`.
            del outcome, attempt

    async def run(self, work: Callable[[], T], abandoned: Event | None = None) -> T:
        """Run `work` in a unit's thread. If the caller is cancelled, `abandoned` is set, and the thread is waited for still."""
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

    def close(self) -> None:
        """Wait for the threads to end."""
        self._units.shutdown()
        self._shards.shutdown()
