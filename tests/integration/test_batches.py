"""Requests of several samples over real processes: they store what requests of one sample store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statetap.core.batching import WANTED_SHARE
from statetap_client.reader import StoreReader

from tests.fakes.cluster import arrays_of, assert_same_store, cluster, token_samples

SAMPLES = token_samples(120, longest=60, seed=5)
PLACEMENT = {"rows_per_shard": 1024, "rows_per_chunk": 64}


@dataclass(frozen=True)
class Done:
    """A job that is over: its store, how many requests it took, and how their size was tuned."""

    store: str
    requests: int
    tuned: list[dict[str, Any]]


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Done:
    done = stored(tmp_path_factory.mktemp("alone"), model, max_batch_tokens=0)
    assert done.requests == len(SAMPLES)
    return done


def stored(folder: Path, model: Path, *flags: str, **runtime: object) -> Done:
    """Run a job of the samples over one worker."""
    with cluster(folder, model, **runtime) as made:
        made.start_worker("w", "--layers", "0,1", *flags)
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            job = made.run_job(client, SAMPLES, "store.zarr", **PLACEMENT)
            assert (job.state, job.progress.samples.stored, job.failures) == ("completed", len(SAMPLES), {})
            (worker,) = client.workers()
            assert made.leftover_dumps() == []
            return Done(job.store, worker.requests, made.log("worker.batch_tuned"))


def test_batches_that_fit_a_pass_store_the_same_bit_for_bit(tmp_path: Path, model: Path, one_by_one: Done) -> None:
    done = stored(tmp_path, model, "--chunked-prefill-size", "-1", max_batch_tokens=300)
    assert done.requests <= len(SAMPLES) // 5
    assert_same_store(one_by_one.store, done.store)


def test_batches_that_are_cut_into_passes_agree_within_rounding(tmp_path: Path, model: Path, one_by_one: Done) -> None:
    """A pass of 64 tokens ends in the middle of a prompt that is shorter than that."""
    done = stored(tmp_path, model, "--chunked-prefill-size", "64", max_batch_tokens=300)
    assert done.requests <= len(SAMPLES) // 5
    next_tokens, wanted_tokens = (arrays_of(store)["samples/next_token"] for store in (done.store, one_by_one.store))
    assert next_tokens.tolist() == wanted_tokens.tolist()
    alone, together = StoreReader(one_by_one.store), StoreReader(done.store)
    for index, sample in enumerate(SAMPLES):
        read, wanted = together.sample_as_numpy(index), alone.sample_as_numpy(index)
        assert read.input_ids.tolist() == sample["input_ids"]
        for name in alone.hidden_arrays:
            expected = getattr(wanted, name)
            assert np.linalg.norm(getattr(read, name) - expected) <= 1e-5 * np.linalg.norm(expected), (sample["id"], name)


def test_the_batch_size_is_tuned_by_itself(tmp_path: Path, model: Path, one_by_one: Done) -> None:
    """A worker that idles after each pass: larger requests idle less often."""
    done = stored(tmp_path, model, "--chunked-prefill-size", "-1", "--gap-seconds", "0.005")
    assert done.requests < len(SAMPLES)
    first = done.tuned[0]
    assert first["before"] == 0
    assert first["max_batch_tokens"] > 60
    assert first["busy_share"] < WANTED_SHARE
    assert_same_store(one_by_one.store, done.store)
