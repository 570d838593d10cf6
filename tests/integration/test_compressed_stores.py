"""A job that compresses: killed in its middle and taken up again, verified, read, grown, and the same states as without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from statetap_client.cli import app
from statetap_client.errors import StatetapError
from statetap_client.reader import StoreReader
from statetap_client.stored_samples import StoredSamples
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from tests.fakes.cluster import Cluster, assert_same_store, cluster, token_samples, until

SAMPLES = token_samples(40, longest=120, seed=4)
UNIT = {"rows_per_shard": 512}
# Slow enough that there is a middle to kill in.
SLOW = ("--layers", "0,1", "--gap-seconds", "0.03")


@pytest.fixture(scope="module")
def uncompressed(calm: Cluster) -> str:
    with calm.client() as client:
        return calm.run_job(client, SAMPLES, "uncompressed.zarr", **UNIT).store


def test_a_compressed_store_is_finished_after_a_kill_verified_and_grown(tmp_path: Path, model: Path, uncompressed: str) -> None:
    with cluster(tmp_path, model) as made:
        made.start_worker("w", *SLOW)
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            job = made.submit(client, SAMPLES, "c.zarr", compression="zstd", **UNIT)
            until("a unit committed", lambda: client.job(job.id).progress.samples.stored > 0)
            made.kill_service()
        with made.start_service() as client:
            assert client.job(job.id).state in ("running", "planning")
            ended = client.wait(job.id, poll_seconds=0.05)
            assert (ended.state, ended.failures, ended.compression) == ("completed", {}, "zstd")
            assert_same_store(uncompressed, ended.store)
            assert shard_bytes(ended.store) < 0.97 * shard_bytes(uncompressed)
            verified = CliRunner().invoke(app, ["verify", ended.store])
            assert verified.exit_code == 0, verified.output
            assert f"{len(SAMPLES)} of {len(SAMPLES)} stored" in verified.output

            with pytest.raises(StatetapError, match="the store has compression = 'zstd', the job needs 'none'"):
                made.submit(client, SAMPLES[:5], "c.zarr", **UNIT)
            more = made.run_job(client, SAMPLES[:5], "c.zarr", compression="zstd", **UNIT)
            assert (more.state, more.progress.samples.stored) == ("completed", 5)
            reader = StoreReader(ended.store)
            assert len(reader.stored) == len(SAMPLES) + 5
            for index in range(5):
                again, first = (reader.sample_as_numpy(i, verify=True) for i in (len(SAMPLES) + index, index))
                assert all(np.array_equal(getattr(again, name), getattr(first, name)) for name in reader.hidden_arrays)
            trained = DataLoader(StoredSamples(ended.store), batch_size=None)
            assert sum(len(sample.input_ids) for sample in trained) == sum(len(s["input_ids"]) for s in SAMPLES + SAMPLES[:5])
        assert made.leftover_dumps() == []


def shard_bytes(store: str) -> int:
    """Bytes of the hidden arrays' objects."""
    return sum(path.stat().st_size for path in Path(store).glob("*_hidden_states*/c/**/*") if path.is_file())
