"""The main job over real processes: the same store whoever works on it, and by whatever evidence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from statetap_client.reader import StoreReader

from tests.fakes.cluster import (
    Cluster,
    arrays_of,
    assert_same_store,
    cluster,
    plain_declaration,
    token_samples,
)

SAMPLES = token_samples(60, longest=150)


@pytest.fixture(scope="module")
def reference(calm: Cluster) -> tuple[Cluster, str]:
    """The store that all others are compared with."""
    with calm.client() as client:
        job = calm.run_job(client, SAMPLES, "alone.zarr")
        assert (job.state, job.progress.samples.stored, job.identity) == ("completed", len(SAMPLES), "tokens")
        assert calm.leftover_dumps() == []
        return calm, job.store


def test_every_sample_is_stored_under_its_own_tokens(reference: tuple[Cluster, str]) -> None:
    store = StoreReader(reference[1])
    assert len(store) == len(SAMPLES)
    for index, sample in enumerate(SAMPLES):
        read = store.sample(index)
        assert (read.id, read.input_ids.tolist()) == (sample["id"], sample["input_ids"])
        assert read.loss_mask.tolist() == sample["loss_mask"]
        assert store.digest(index) == store.recorded_digest(index)
    assert (arrays_of(reference[1])["samples/next_token"] >= 0).all()


def test_two_workers_store_the_same(tmp_path: Path, model: Path, reference: tuple[Cluster, str]) -> None:
    with cluster(tmp_path, model) as made:
        for name in ("left", "right"):
            made.start_worker(name, "--layers", "0,1")
        with made.start_service() as client:
            made.wait_for_workers(client, "left", "right")
            job = made.run_job(client, SAMPLES, "two.zarr")
            assert job.state == "completed"
            assert {worker for worker, tally in job.workers.items() if tally["stored"]} == {"left", "right"}
        assert_same_store(reference[1], job.store)


@pytest.mark.parametrize(("kind", "published_by"), [("safetensors", "rename"), ("pt", "DONE"), ("safetensors", "meta.json")])
def test_plain_dumps_matched_by_count_store_the_same(
    tmp_path: Path, model: Path, reference: tuple[Cluster, str], kind: str, published_by: str
) -> None:
    with cluster(tmp_path, model) as made:
        declared = plain_declaration(made.dumps, "plain", model, format=kind, published_by=published_by)
        flags = ("--layers", "0,1", "--plain", kind, "--plain-published-by", published_by, "--publish-decode")
        made.start_worker("plain", *flags, plain=declared)
        with made.start_service() as client:
            made.wait_for_workers(client, "plain")
            job = made.run_job(client, SAMPLES, "plain.zarr")
            assert (job.state, job.failures, job.identity) == ("completed", {}, "count")
            assert made.leftover_dumps() == []
        assert_same_store(reference[1], job.store)


def test_chunks_of_64_tokens_agree_within_rounding(tmp_path: Path, model: Path, reference: tuple[Cluster, str]) -> None:
    with cluster(tmp_path, model) as made:
        made.start_worker("chunked", "--layers", "0,1", "--chunked-prefill-size", "64")
        with made.start_service() as client:
            made.wait_for_workers(client, "chunked")
            job = made.run_job(client, SAMPLES, "chunked.zarr")
            assert job.state == "completed"
        whole, chunked = StoreReader(reference[1]), StoreReader(job.store)
        for index, sample in enumerate(SAMPLES):
            stored, wanted = chunked.sample_as_numpy(index), whole.sample_as_numpy(index)
            assert stored.input_ids.tolist() == sample["input_ids"]
            for name in whole.hidden_arrays:
                expected = getattr(wanted, name)
                difference = np.linalg.norm(getattr(stored, name) - expected)
                assert difference <= 1e-5 * np.linalg.norm(expected), (sample["id"], name)


def test_plain_dumps_of_chunked_prompts_agree_too(tmp_path: Path, model: Path, reference: tuple[Cluster, str]) -> None:
    """The pattern c, c, …, remainder, with decode passes among the dumps; a remainder of one row is refused."""
    with cluster(tmp_path, model) as made:
        declared = plain_declaration(made.dumps, "plain", model, chunked_prefill_size=64)
        flags = ("--layers", "0,1", "--plain", "safetensors", "--publish-decode", "--chunked-prefill-size", "64")
        made.start_worker("plain", *flags, plain=declared)
        with made.start_service() as client:
            made.wait_for_workers(client, "plain")
            job = made.run_job(client, SAMPLES, "plain.zarr")
    one_row = [index for index, sample in enumerate(SAMPLES) if len(sample["input_ids"]) % 64 == 1]
    assert one_row
    assert (job.state, job.failures) == ("completed", {"too_short": len(one_row)})
    whole, chunked = StoreReader(reference[1]), StoreReader(job.store)
    assert set(range(len(SAMPLES))) - set(chunked.stored.tolist()) == set(one_row)
    for index in chunked.stored.tolist():
        stored, wanted = chunked.sample_as_numpy(index), whole.sample_as_numpy(index)
        assert stored.input_ids.tolist() == SAMPLES[index]["input_ids"]
        for name in whole.hidden_arrays:
            expected = getattr(wanted, name)
            assert np.linalg.norm(getattr(stored, name) - expected) <= 1e-5 * np.linalg.norm(expected), (index, name)


def test_a_permuted_store_holds_the_same_samples_in_another_order(reference: tuple[Cluster, str]) -> None:
    made, alone = reference
    with made.client() as client:
        job = made.run_job(client, SAMPLES, "permuted.zarr", order="permutation", seed=7)
    in_order, permuted = StoreReader(alone), StoreReader(job.store)
    starts = arrays_of(job.store)["samples/row_start"].tolist()
    assert sorted(starts) != starts
    for index in range(len(SAMPLES)):
        assert permuted.digest(index) == in_order.digest(index)
        assert permuted.sample(index).input_ids.tolist() == SAMPLES[index]["input_ids"]
