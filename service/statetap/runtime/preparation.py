"""Makes a job's store ready: its arrays exist and are large enough, its tokens are written. Doing it again changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from statetap.core.records import DatasetRecord, JobRecord, JobSpec
from statetap.ports import Ledger, OpenDataset, Store, StoreFacts, StorePlan, TokenBlock

STORE_FORMAT_VERSION = 1
LAYER_CONVENTION = "L_i is the residual stream after 0-based decoder layer i"
SAMPLES_PER_READ = 1 << 14


def store_plan(spec: JobSpec, dataset: DatasetRecord, *, rows: int, samples: int, version: str) -> StorePlan:
    """What the job's store must be (contract §3), with at least so many rows and samples."""
    return StorePlan(
        arrays=spec.capture.hidden_arrays(spec.model),
        geometry=spec.geometry,
        rows=rows,
        samples=samples,
        compression=spec.compression,
        attributes={
            "format_version": STORE_FORMAT_VERSION,
            "statetap_version": version,
            "model": spec.model.model_path,
            "model_fingerprint": spec.model.model_fingerprint,
            "tokenizer": dataset.tokenizer,
            "chat_template_sha256": dataset.chat_template_sha256,
            "aux_layer_ids": list(spec.capture.aux_layer_ids),
            "layer_convention": LAYER_CONVENTION,
            "final": str(spec.capture.final),
            "dtype": spec.model.dtype,
            "identity": str(spec.identity),
            "rows_per_shard": spec.geometry.rows_per_shard,
            "rows_per_chunk": spec.geometry.rows_per_chunk,
            "placement": {"order": spec.order, "seed": spec.seed},
            "datasets": [dataset.sha256],
        },
    )


async def prepare(
    job: JobRecord, dataset: DatasetRecord, tokens: OpenDataset, ledger: Ledger, store: Store, version: str
) -> StoreFacts | None:
    """Create or grow the store, and write the job's tokens; returns what was there before. StoreError: it cannot be done."""
    spec = job.spec
    before = await store.describe(spec.store)
    starts, lengths = await _rows(job, ledger)
    placed = starts >= 0
    last = int((starts + lengths)[placed].max()) if placed.any() else spec.first_row
    # Units are whole shards.
    rows = -(-last // spec.geometry.rows_per_shard) * spec.geometry.rows_per_shard
    await store.prepare(
        spec.store, store_plan(spec, dataset, rows=rows, samples=spec.first_sample + job.counts.samples, version=version)
    )
    await store.write_tokens(spec.store, _blocks(tokens, starts, lengths, spec.geometry.rows_per_shard))
    return before


async def _rows(job: JobRecord, ledger: Ledger) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By dataset index: each sample's first row (-1 if it has none) and its rows."""
    starts = np.full(job.counts.samples, -1, dtype=np.int64)
    lengths = np.zeros(job.counts.samples, dtype=np.int64)
    for first in range(0, len(starts), SAMPLES_PER_READ):
        columns = await ledger.sample_columns(job.id, first, SAMPLES_PER_READ)
        read = slice(first, first + len(columns.ids))
        starts[read], lengths[read] = columns.row_start, columns.length
    return starts, lengths


def _blocks(
    tokens: OpenDataset, starts: NDArray[np.int64], lengths: NDArray[np.int64], rows_per_shard: int
) -> Iterator[TokenBlock]:
    """The placed samples' tokens, in row order: of samples that follow one another in dataset and store alike, as one block.

    No block crosses a shard of the hidden arrays, so that none grows with the job.
    """
    order = np.argsort(starts, kind="stable")
    order = order[np.count_nonzero(starts < 0) :]
    if not len(order):
        return
    first, ends = starts[order], (starts + lengths)[order]
    whole = lengths[order] == tokens.lengths[order]
    follows = (np.diff(order) == 1) & (first[1:] == ends[:-1]) & whole[:-1] & (first[1:] % rows_per_shard > 0)
    begins = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    stops = np.concatenate([begins[1:], [len(order)]])
    runs = (order[begins], order[begins] + (stops - begins), first[begins], ends[stops - 1])
    for index, stop, row, end in zip(*(numbers.tolist() for numbers in runs), strict=True):
        input_ids, loss_mask = tokens.tokens(index, stop)
        # The last of them may be cut short.
        yield TokenBlock(row, input_ids[: end - row], loss_mask[: end - row])
