"""`ArrowDatasets` with its real pool: one process, shared by the tests of this file."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from statetap.adapters.datasets.arrow import ArrowDatasets
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.tokenizer import TokenizerSource
from statetap.core.records import DatasetRecord
from statetap.ports import DatasetRefused, NotFound


class NoonClock:
    def now(self) -> float:
        return 43200.0

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def datasets(folder, root, plain_model):
    source = TokenizerSource("tiny", str(plain_model))
    limits = IntakeLimits(samples=50_000, line_bytes=100_000)
    datasets = ArrowDatasets(folder, lambda: {"tiny": source}, clock=NoonClock(), roots=[root], limits=limits, processes=1)
    yield datasets
    asyncio.run(datasets.close())


def ndjson(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def ingest(datasets: ArrowDatasets, *chunks: bytes, gzipped: bool = False, model: str | None = None) -> DatasetRecord:
    return await datasets.ingest(stream(*chunks), name="data", model=model, gzipped=gzipped, allow_empty_mask=False)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_a_dataset_is_kept_and_opened(datasets, folder, plain_model):
    body = ndjson({"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"text": "hello"})
    record = await ingest(datasets, body[:20], body[20:])
    opened = await datasets.open(record.id)
    hello = opened.input_ids(1)
    assert (opened.id(0), opened.id(1)) == ("a", "2")
    assert opened.input_ids(0).tolist() == [1, 2, 3]
    assert opened.input_ids(0).dtype == np.int32
    assert opened.loss_mask(0).tolist() == [0, 1, 1]
    assert opened.loss_mask(0).dtype == np.uint8
    assert opened.lengths.tolist() == [3, len(hello)]
    assert (record.name, record.model, record.tokenizer) == ("data", "tiny", str(plain_model))
    assert (record.samples, record.tokens, record.max_tokens) == (2, 3 + len(hello), max(3, len(hello)))
    assert (len(record.sha256), len(record.chat_template_sha256), record.created_at) == (64, 64, 43200.0)
    assert f"{record.id}.arrow" in names(folder)


async def test_many_batches_stay_in_order(datasets):
    records = [{"id": f"s{number}", "input_ids": [number % 400] * (1 + number % 97)} for number in range(20_000)]
    body = ndjson(*records)
    assert len(body) > 3 << 20
    record = await ingest(datasets, *(body[at : at + 65_536] for at in range(0, len(body), 65_536)))
    opened = await datasets.open(record.id)
    assert opened.lengths.tolist() == [len(one["input_ids"]) for one in records]
    for number in (0, 1, 6_000, 13_337, 19_999):
        assert opened.id(number) == f"s{number}"
        assert opened.input_ids(number).tolist() == records[number]["input_ids"]
    with pytest.raises(IndexError):
        opened.id(20_000)


async def test_the_sha256_is_over_what_was_said_not_over_the_bytes(datasets):
    plain = ndjson({"id": "1", "input_ids": [1, 2]}, {"id": "2", "input_ids": [3]})
    spaced = b'{"loss_mask": [1, 1], "input_ids":  [1,2]}\n{"input_ids": [3], "extra": 0}\n\n'
    first, second = await ingest(datasets, plain), await ingest(datasets, gzip.compress(spaced), gzipped=True)
    other = await ingest(datasets, ndjson({"id": "1", "input_ids": [1, 2]}, {"id": "2", "input_ids": [4]}))
    assert first.id != second.id
    assert first.sha256 == second.sha256 != other.sha256


async def test_the_file_says_what_it_is(datasets, folder):
    record = await ingest(datasets, ndjson({"input_ids": [1]}))
    with pa.memory_map(str(folder / f"{record.id}.arrow")) as source:
        reader = pa.ipc.open_file(source)
        metadata = {key.decode(): value.decode() for key, value in reader.schema.metadata.items()}
        last, closing = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
        assert (last.num_rows, closing[b"sha256"].decode()) == (0, record.sha256)
    assert metadata == {
        "name": "data",
        "model": "tiny",
        "tokenizer": record.tokenizer,
        "chat_template_sha256": record.chat_template_sha256,
    }


async def test_samples_are_slices_of_the_mapping(datasets):
    record = await ingest(datasets, ndjson({"input_ids": [1, 2]}, {"input_ids": [3, 4]}))
    opened = await datasets.open(record.id)
    assert not opened.input_ids(1).flags.owndata
    assert not opened.input_ids(1).flags.writeable
    assert np.shares_memory(opened.input_ids(1), opened.input_ids(1))


def faulty_bodies() -> Iterable[tuple[bytes, int | None, str | None, str]]:
    good = ndjson({"input_ids": [1]})
    yield b"", None, None, "no samples"
    yield b"\n \n", None, None, "no samples"
    yield good + b"oops\n", 2, None, "not JSON"
    yield good + ndjson({"input_ids": [400]}), 2, "input_ids", "outside the vocabulary"
    yield good + ndjson({"id": "1", "input_ids": [2]}), 2, "id", "used on line 1 already"
    yield b"\n" + ndjson(*({"id": name, "input_ids": [2]} for name in "abcb")), 5, "id", "id 'b' was used on line 3"
    yield good + b"oops\n" + b"x" * 200_000, 2, None, "not JSON"
    yield good + b"x" * 200_000, 2, None, "longer than 100000"
    yield good * 50_001, None, None, "more than 50000 samples"


@pytest.mark.parametrize(("body", "line", "field", "reason"), list(faulty_bodies()))
async def test_a_refused_dataset_leaves_nothing(datasets, folder, body, line, field, reason):
    before = names(folder)
    with pytest.raises(DatasetRefused) as caught:
        await ingest(datasets, body)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert reason in caught.value.reason
    assert names(folder) == before


@pytest.mark.parametrize("error", [ConnectionResetError("the client went away"), asyncio.CancelledError()])
async def test_a_body_that_breaks_off_leaves_nothing(datasets, folder, error):
    async def broken() -> AsyncIterator[bytes]:
        yield ndjson({"input_ids": [1]})
        raise error

    before = names(folder)
    with pytest.raises(type(error)):
        await datasets.ingest(broken(), name="data", model=None, gzipped=False, allow_empty_mask=False)
    assert names(folder) == before


async def test_an_unknown_model_is_refused_with_those_that_are_known(datasets):
    with pytest.raises(DatasetRefused, match=r"'other' is neither .* known: tiny"):
        await ingest(datasets, ndjson({"input_ids": [1]}), model="other")


@pytest.mark.parametrize("suffix", [".ndjson", ".jsonl.gz"])
async def test_a_path_is_read(datasets, root, suffix):
    body = ndjson({"input_ids": [1, 2]})
    (root / f"data{suffix}").write_bytes(gzip.compress(body) if suffix.endswith(".gz") else body)
    record = await datasets.ingest_path(f"data{suffix}", name="data", model="tiny", allow_empty_mask=False)
    assert (await datasets.open(record.id)).input_ids(0).tolist() == [1, 2]


async def test_a_deleted_dataset_is_gone_but_for_who_has_it_open(datasets, folder):
    record = await ingest(datasets, ndjson({"input_ids": [1, 2]}))
    opened = await datasets.open(record.id)
    await datasets.delete(record.id)
    await datasets.delete(record.id)
    assert opened.input_ids(0).tolist() == [1, 2]
    assert f"{record.id}.arrow" not in names(folder)
    with pytest.raises(NotFound):
        await datasets.open(record.id)


@pytest.mark.parametrize("dataset", ["../secret", "ds_1", "", "ds_" + "g" * 32])
async def test_what_is_no_id_is_not_found(datasets, dataset):
    with pytest.raises(NotFound):
        await datasets.open(dataset)


def test_leftovers_of_a_crash_are_swept_and_datasets_kept(tmp_path):
    (tmp_path / ".incoming-ds_1").touch()
    (tmp_path / "ds_2.arrow").touch()
    ArrowDatasets(tmp_path, dict, clock=NoonClock())
    assert names(tmp_path) == {"ds_2.arrow"}


async def test_a_pool_process_that_dies_is_told_and_replaced(datasets, folder):
    await ingest(datasets, ndjson({"input_ids": [1]}))
    before = names(folder)
    [victim] = datasets._pool._processes

    async def body() -> AsyncIterator[bytes]:
        yield ndjson({"input_ids": [1]})
        os.kill(victim, 9)
        with suppress(ChildProcessError):  # the pool has seen to it already
            await asyncio.to_thread(os.waitid, os.P_PID, victim, os.WEXITED | os.WNOWAIT)

    with pytest.raises(DatasetRefused, match="a tokenising process died"):
        await datasets.ingest(body(), name="data", model=None, gzipped=False, allow_empty_mask=False)
    assert names(folder) == before
    assert (await ingest(datasets, ndjson({"input_ids": [1]}))).samples == 1


async def test_a_line_that_takes_too_long_ends_its_process_and_nothing_else(tmp_path, plain_model):
    """A tokenizer takes the square of a word's length and heeds no one: only the kernel stops it."""
    source = TokenizerSource("tiny", str(plain_model))
    limits = IntakeLimits(batch_cpu_seconds=3.0)
    datasets = ArrowDatasets(tmp_path, lambda: {"tiny": source}, clock=NoonClock(), limits=limits, processes=1)
    try:
        await ingest(datasets, ndjson({"text": "a cat"}))
        with pytest.raises(DatasetRefused, match="took more than 3 s"):
            await ingest(datasets, ndjson({"text": "a" * 12_000_000}))
        assert (await ingest(datasets, ndjson({"text": "a cat"}))).samples == 1
        assert len(names(tmp_path)) == 2
    finally:
        await datasets.close()
