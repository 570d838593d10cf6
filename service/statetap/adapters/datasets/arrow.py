"""`ArrowDatasets`: takes datasets in through a process pool, and keeps each as one Arrow file in a folder of its own.

The event loop only hands things on: lines are cut and files written in threads, lines are read and tokenised in the pool, in
order, with a bounded number of batches in flight. A dataset exists once its file has its name; before that it is a dot-file,
which is swept at start.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from statetap.adapters.datasets.arrow_file import ArrowDataset
from statetap.adapters.datasets.encoding import Rules, settle_in
from statetap.adapters.datasets.intake import Intake, remove_leftovers
from statetap.adapters.datasets.limits import DEFAULT_LIMITS, MIB, IntakeLimits
from statetap.adapters.datasets.paths import open_below
from statetap.adapters.datasets.tokenizer import TokenizerSource, describe
from statetap.core.records import DatasetRecord
from statetap.ports import Clock, DatasetRefused, NotFound

ID_PATTERN = re.compile(r"ds_[0-9a-f]{32}")


class ArrowDatasets:
    """Datasets below `folder`, tokenised for one of `tokenizers()` (by model name, at that moment; the first is the default).

    `roots` are the folders that `ingest_path` may read from; `processes` the size of the pool, which starts with the first
    dataset. One service alone uses a folder. Implements `Datasets`.
    """

    def __init__(
        self,
        folder: Path,
        tokenizers: Callable[[], Mapping[str, TokenizerSource]],
        *,
        clock: Clock,
        roots: Sequence[Path] = (),
        limits: IntakeLimits = DEFAULT_LIMITS,
        processes: int = 2,
    ) -> None:
        self._folder = folder
        self._tokenizers = tokenizers
        self._clock = clock
        self._roots = tuple(roots)
        self._limits = limits
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    async def ingest(
        self, body: AsyncIterator[bytes], *, name: str, model: str | None, gzipped: bool, allow_empty_mask: bool
    ) -> DatasetRecord:
        source = self._source(model)
        rules = Rules(source, self._limits, allow_empty_mask)
        pool = self._started_pool()
        try:
            facts = await asyncio.wrap_future(pool.submit(describe, source))
            intake = Intake(self._folder, f"ds_{uuid.uuid4().hex}", name, rules, facts, pool, in_flight=2 * self._processes)
            return await intake.take(body, gzipped=gzipped, created_at=self._clock.now())
        except BrokenProcessPool as error:
            if self._pool is pool:
                self._pool = None
            raise DatasetRefused(
                "a tokenising process died: for lack of memory, or because a line (of this dataset or another) took more than "
                f"{self._limits.batch_cpu_seconds:g} s, as one very long word does; nothing was kept, submit the dataset again"
            ) from error

    async def ingest_path(self, path: str, *, name: str, model: str | None, allow_empty_mask: bool) -> DatasetRecord:
        file = await asyncio.to_thread(open_below, path, self._roots)

        async def body() -> AsyncIterator[bytes]:
            while chunk := await asyncio.to_thread(file.read, MIB):
                yield chunk

        try:
            return await self.ingest(
                body(), name=name, model=model, gzipped=path.endswith(".gz"), allow_empty_mask=allow_empty_mask
            )
        finally:
            file.close()

    async def open(self, dataset: str) -> ArrowDataset:
        """Map a dataset. NotFound: there is none of that id."""
        try:
            return await asyncio.to_thread(ArrowDataset, self._path(dataset))
        except FileNotFoundError as error:
            raise NotFound(f"no dataset {dataset!r}") from error

    async def delete(self, dataset: str) -> None:
        """Remove a dataset's file; who has it open keeps it. That there is none is no error."""
        await asyncio.to_thread(self._path(dataset).unlink, missing_ok=True)

    async def close(self) -> None:
        """Stop the pool; batches that run are finished first."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)

    def _path(self, dataset: str) -> Path:
        if not ID_PATTERN.fullmatch(dataset):
            raise NotFound(f"no dataset {dataset!r}")
        return self._folder / f"{dataset}.arrow"

    def _source(self, model: str | None) -> TokenizerSource:
        tokenizers = self._tokenizers()
        if not tokenizers:
            raise DatasetRefused(
                "no tokenizer is known; set `model` in the settings, or wait until a worker has told what it serves"
            )
        if model is None:
            return next(iter(tokenizers.values()))
        if model not in tokenizers:
            raise DatasetRefused(f"model {model!r} is neither configured nor served by a worker; known: {', '.join(tokenizers)}")
        return tokenizers[model]

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned, not forked: the service has threads and an event loop.
            self._pool = ProcessPoolExecutor(self._processes, mp_context=get_context("spawn"), initializer=settle_in)
        return self._pool
