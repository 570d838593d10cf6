"""What runs in a pool process: a batch of lines in, a record batch out."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from statetap_client.dataset_digest import sample_digest

from statetap.adapters.datasets.arrow_file import COLUMNS
from statetap.adapters.datasets.chat import encode_chat
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.lines import LineBatch, too_long
from statetap.adapters.datasets.samples import Chat, Sample, Text, Tokens, read_sample
from statetap.adapters.datasets.tokenizer import Binding, TokenizerSource, bind
from statetap.ports import DatasetRefused

Encoded = tuple[NDArray[np.int32], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch's samples: `records` an Arrow record batch (IPC message), `digests` their record digests one after the other.

    `lines` int64 `[n]` are their lines, `id_hashes` uint64 `[n]` XXH3-64 of their ids.
    """

    records: bytes
    digests: bytes
    lines: NDArray[np.int64]
    id_hashes: NDArray[np.uint64]
    tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Rules:
    """How a dataset's lines are read: the same for all its batches."""

    source: TokenizerSource
    limits: IntakeLimits
    allow_empty_mask: bool


def settle_in() -> None:
    """Prepare a pool process: an interrupt at the terminal is the service's to handle, and this dies when the service does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # Told nothing, a pool process waits for work for ever: a service that was killed cannot tell it.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def encode_batch_in_time(rules: Rules, batch: LineBatch) -> EncodedBatch:
    """`encode_batch`, in a pool process that the kernel ends when it takes longer: a tokenizer's own code heeds nothing else."""
    signal.setitimer(signal.ITIMER_PROF, rules.limits.batch_cpu_seconds)
    try:
        return encode_batch(rules, batch)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def encode_batch(rules: Rules, batch: LineBatch) -> EncodedBatch:
    """Read, check and tokenise the lines of a batch.

    Raises:
        DatasetRefused: for the first line at fault.
    """
    binding = bind(rules.source)
    # One line after the other, so that the first at fault is the one that is named.
    samples, encoded = [], []
    for sample in _read_samples(rules, batch):
        samples.append(sample)
        encoded.append(_encode(rules, binding, sample))
    lengths = [len(ids) for ids, _ in encoded]
    return EncodedBatch(
        records=_records([sample.id for sample in samples], lengths, encoded),
        digests=b"".join(sample_digest(sample.id, ids, mask) for sample, (ids, mask) in zip(samples, encoded, strict=True)),
        lines=np.array([sample.line for sample in samples], np.int64),
        id_hashes=np.array([xxhash.xxh3_64_intdigest(sample.id.encode()) for sample in samples], np.uint64),
        tokens=sum(lengths),
        max_tokens=max(lengths, default=0),
    )


def _read_samples(rules: Rules, batch: LineBatch) -> Iterator[Sample]:
    """Blank lines are passed over, wherever they are; they count in line numbers."""
    for line, text in enumerate(batch.text.split(b"\n"), batch.first_line):
        if len(text) > rules.limits.line_bytes:
            raise too_long(line, rules.limits)
        if text and not text.isspace():
            yield read_sample(text, line, rules.limits)


def _encode(rules: Rules, binding: Binding, sample: Sample) -> Encoded:
    content, line = sample.content, sample.line
    match content:
        case Tokens():
            field, (ids, mask) = "input_ids", _encode_tokens(binding, content, line)
        case Text():
            field, (ids, mask) = "text", _encode_text(binding, content, line)
        case Chat():
            field, (ids, mask) = content.field, encode_chat(binding, content, line)
    if not len(ids):
        raise DatasetRefused("the sample has no tokens; leave it out", line=line, field=field)
    if field != "input_ids":
        _check_vocabulary(binding, int(ids.min()), int(ids.max()), line, field)
    if not rules.allow_empty_mask and not mask.any():
        raise DatasetRefused(
            "no token is trained on, the mask is all 0 (a chat without an assistant message?); leave the sample out, "
            "or allow empty masks",
            line=line,
            field="loss_mask" if field == "input_ids" else field,
        )
    return ids, mask


def _encode_tokens(binding: Binding, tokens: Tokens, line: int) -> Encoded:
    # Checked before the array is made: JSON integers may be wider than int32.
    _check_vocabulary(binding, min(tokens.ids), max(tokens.ids), line, "input_ids")
    ids = np.array(tokens.ids, np.int32)
    return ids, np.ones(len(ids), np.uint8) if tokens.mask is None else np.array(tokens.mask, np.uint8)


def _encode_text(binding: Binding, content: Text, line: int) -> Encoded:
    ids = np.array(binding.require_tokenizer(line, "text")(content.text, verbose=False)["input_ids"], np.int32)
    return ids, np.ones(len(ids), np.uint8)


def _check_vocabulary(binding: Binding, lowest: int, highest: int, line: int, field: str) -> None:
    """One id outside the vocabulary ends a whole SGLang server."""
    size = binding.facts.vocab_size
    if lowest < 0 or highest >= size:
        raise DatasetRefused(
            f"id {lowest if lowest < 0 else highest} is outside the vocabulary of model {binding.source.model!r}, "
            f"which is 0 to {size - 1}; tokenise for this model, or bind the dataset to another",
            line=line,
            field=field,
        )


def _records(ids: list[str], lengths: list[int], encoded: list[Encoded]) -> bytes:
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64))
    tokens = np.concatenate([np.empty(0, np.int32), *(sample_ids for sample_ids, _ in encoded)])
    masks = np.concatenate([np.empty(0, np.uint8), *(mask for _, mask in encoded)])
    columns = [
        pa.array(ids, pa.string()),
        pa.LargeListArray.from_arrays(offsets, pa.array(tokens)),
        pa.LargeListArray.from_arrays(offsets, pa.array(masks)),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=COLUMNS)
    serialized: bytes = batch.serialize().to_pybytes()
    return serialized
