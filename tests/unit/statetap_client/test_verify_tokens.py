"""verify_tokens.py: the datasets' sha256 is found again in the store, dataset by dataset, and only where nothing differs."""

import hashlib

import numpy as np
import pytest
import zarr
from statetap.core.placement import Geometry
from statetap_client import verify_tokens as module
from statetap_client.dataset_digest import sample_digest
from statetap_client.reader import StoreReader
from statetap_client.verify_tokens import verify_tokens

from tests.fakes.store_on_disk import hidden_arrays, random_rows, write_store

LENGTHS = (5, 9, 2, 7, 30)
IDS = [np.arange(length, dtype=np.int32) * (3 + i) for i, length in enumerate(LENGTHS)]


def sha256_of(indexes) -> str:
    digests = [sample_digest(f"sample-{i}", IDS[i], np.ones(LENGTHS[i], np.uint8)) for i in indexes]
    return hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.fixture
def store(tmp_path):
    """Five samples that two datasets brought, the third of them without states."""
    arrays, rng = hidden_arrays("float32"), np.random.default_rng(0)
    samples = [{array.name: random_rows(array, length, rng) for array in arrays} for length in LENGTHS]
    datasets = [sha256_of(range(2)), sha256_of(range(2, 5))]
    write_store(
        tmp_path / "s", arrays, samples, geometry=Geometry(64, 16, 16), input_ids=IDS, failed=frozenset({2}), datasets=datasets
    )
    return tmp_path / "s", datasets


@pytest.mark.parametrize("rows_per_shard", [1 << 20, 7])
def test_every_dataset_is_confirmed(store, monkeypatch, rows_per_shard):
    path, datasets = store
    monkeypatch.setattr(module.layout, "TOKEN_ROWS_PER_SHARD", rows_per_shard)
    report = verify_tokens(StoreReader(path))
    assert (report.confirmed, report.unconfirmed) == (datasets, [])


@pytest.mark.parametrize(("array", "sample"), [("input_ids", 3), ("loss_mask", 4)])
def test_another_token_or_mask_is_found_out(store, array, sample):
    path, datasets = store
    row, _ = StoreReader(path).row_range(sample)
    opened = zarr.open_array(path / array, mode="r+")
    opened[row] = 1 - opened[row] if array == "loss_mask" else opened[row] + 1
    report = verify_tokens(StoreReader(path))
    assert (report.confirmed, report.unconfirmed) == (datasets[:1], datasets[1:])


def test_another_id_is_found_out(store):
    path, datasets = store
    ids = zarr.open_array(path / "samples" / "id", mode="r+")
    ids[0] = "somebody-else"
    assert verify_tokens(StoreReader(path)).unconfirmed == datasets
