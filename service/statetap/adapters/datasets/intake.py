"""One dataset on its way in: from a stream of bytes to a file with its name, or to nothing at all."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from statetap.adapters.datasets.arrow_file import ArrowDataset, DatasetFile
from statetap.adapters.datasets.encoding import EncodedBatch, Rules, encode_batch_in_time
from statetap.adapters.datasets.limits import MIB
from statetap.adapters.datasets.lines import LineBatch, LineBatches
from statetap.adapters.datasets.tokenizer import TokenizerFacts
from statetap.core.records import DatasetRecord
from statetap.ports import DatasetRefused

LEFTOVER_PREFIX = ".incoming-"
P = ParamSpec("P")
T = TypeVar("T")


def remove_leftovers(folder: Path) -> None:
    """Sweep what a crash left of datasets that never got their names."""
    for leftover in folder.glob(f"{LEFTOVER_PREFIX}*"):
        leftover.unlink()


class Intake:
    """Takes one body in. Use once. `in_flight` bounds the batches that are in the pool at a time."""

    def __init__(
        self,
        folder: Path,
        dataset: str,
        name: str,
        rules: Rules,
        facts: TokenizerFacts,
        pool: ProcessPoolExecutor,
        *,
        in_flight: int,
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._name = name
        self._rules = rules
        self._facts = facts
        self._pool = pool
        self._in_flight = in_flight
        self._running: deque[Future[EncodedBatch]] = deque()
        self._cut_short: DatasetRefused | None = None
        self._digest = hashlib.sha256()
        self._lines: list[NDArray[np.int64]] = []
        self._id_hashes: list[NDArray[np.uint64]] = []
        self._samples = 0
        self._tokens = 0
        self._max_tokens = 0

    async def take(self, body: AsyncIterator[bytes], *, gzipped: bool, created_at: float) -> DatasetRecord:
        """Read `body` to its end, and keep the dataset under its name.

        Raises:
            DatasetRefused: nothing is kept. Of several lines at fault the first is named, duplicate ids last.
        """
        temporary, kept = self._folder / f"{LEFTOVER_PREFIX}{self._dataset}", self._folder / f"{self._dataset}.arrow"
        try:
            file = await to_its_end(DatasetFile, temporary, self._metadata())
            try:
                await self._read(body, file, LineBatches(self._rules.limits, gzipped=gzipped))
                await to_its_end(file.finish, self._digest.hexdigest())
            finally:
                await to_its_end(file.close)
            await to_its_end(self._publish, temporary, kept)
        except BaseException as error:
            for future in self._running:
                future.cancel()
            await to_its_end(_remove, temporary, kept)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise DatasetRefused(f"no space is left in {self._folder}; free some and submit the dataset again") from error
            raise
        return self._record(created_at)

    async def _read(self, body: AsyncIterator[bytes], file: DatasetFile, lines: LineBatches) -> None:
        async for batch in self._batches(body, lines):
            self._running.append(self._pool.submit(encode_batch_in_time, self._rules, batch))
            while len(self._running) >= self._in_flight:
                await self._keep_oldest(file)
        while self._running:
            await self._keep_oldest(file)
        if self._cut_short:
            raise self._cut_short
        if not self._samples:
            raise DatasetRefused("the dataset has no samples; send at least one line")

    async def _batches(self, body: AsyncIterator[bytes], lines: LineBatches) -> AsyncIterator[LineBatch]:
        """Where a body cannot be cut into lines to its end, the lines before come first: one of them may be at fault too."""
        try:
            async for chunk in _coalesced(body):
                batches = lines.feed(chunk)
                # One at a time: a packed chunk can hold many.
                while batch := await asyncio.to_thread(next, batches, None):
                    yield batch
            for batch in lines.finish():
                yield batch
        except DatasetRefused as refusal:
            self._cut_short = refusal

    async def _keep_oldest(self, file: DatasetFile) -> None:
        """Append the oldest batch in flight, once it is done."""
        batch = await asyncio.wrap_future(self._running[0])
        self._running.popleft()
        self._samples += len(batch.lines)
        if self._samples > self._rules.limits.samples:
            raise DatasetRefused(f"the dataset has more than {self._rules.limits.samples} samples; split it into several")
        self._tokens += batch.tokens
        self._max_tokens = max(self._max_tokens, batch.max_tokens)
        self._digest.update(batch.digests)
        self._lines.append(batch.lines)
        self._id_hashes.append(batch.id_hashes)
        if len(batch.lines):
            await to_its_end(file.append, batch.records)

    def _publish(self, temporary: Path, kept: Path) -> None:
        self._refuse_duplicates(temporary)
        temporary.rename(kept)
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _refuse_duplicates(self, path: Path) -> None:
        """Hashes find the candidates (16 bytes a sample, where a set of ids would take a hundred); the ids themselves decide."""
        hashes, lines = np.concatenate(self._id_hashes), np.concatenate(self._lines)
        order = np.argsort(hashes, kind="stable")
        repeats = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if not len(repeats):
            return
        ids = ArrowDataset(path)
        # In the order of their lines, and one at a time: there may be as many as there are samples.
        for repeat in repeats[np.argsort(order[repeats + 1])]:
            first, second = order[repeat], order[repeat + 1]
            if ids.id(int(first)) == ids.id(int(second)):
                raise DatasetRefused(
                    f"id {ids.id(int(second))!r} was used on line {lines[first]} already; ids are unique in a dataset "
                    "(a sample without one has its line number)",
                    line=int(lines[second]),
                    field="id",
                )

    def _metadata(self) -> dict[str, str]:
        return {
            "name": self._name,
            "model": self._rules.source.model,
            "tokenizer": self._rules.source.path,
            "chat_template_sha256": self._facts.chat_template_sha256,
        }

    def _record(self, created_at: float) -> DatasetRecord:
        return DatasetRecord(
            id=self._dataset,
            name=self._name,
            model=self._rules.source.model,
            samples=self._samples,
            tokens=self._tokens,
            max_tokens=self._max_tokens,
            sha256=self._digest.hexdigest(),
            tokenizer=self._rules.source.path,
            chat_template_sha256=self._facts.chat_template_sha256,
            created_at=created_at,
        )


async def to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread; if cancelled, wait for it all the same: nothing may touch its file while it runs."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def _coalesced(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The body in pieces of about a MiB: a network's pieces are too small to pay for a thread each."""
    pieces: list[bytes] = []
    size = 0
    async for piece in body:
        pieces.append(piece)
        size += len(piece)
        if size >= MIB:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)
