"""StoreReader on a URL of an object store."""

import json
import pickle
import sys

import numpy as np
import obstore
import pytest
from obstore.store import from_url
from statetap.core.placement import Geometry
from statetap_client import object_stores
from statetap_client.cli import app
from statetap_client.reader import NotAStore, StoreReader, StoreReadError
from typer.testing import CliRunner

from tests.fakes.object_store import SECRET, Fault
from tests.fakes.store_on_disk import hidden_arrays, random_rows, write_store


@pytest.fixture
def stores(tmp_path, object_place):
    """A store on a disk, and the very objects of it at an object store."""
    arrays, rng = hidden_arrays(), np.random.default_rng(0)
    samples = [{array.name: random_rows(array, rows, rng) for array in arrays} for rows in (5, 3, 7)]
    write_store(tmp_path / "a.zarr", arrays, samples, geometry=Geometry(8, 4, 2))
    url = f"{object_place}/a.zarr"
    for path in (tmp_path / "a.zarr").rglob("*"):
        if path.is_file():
            obstore.put(from_url(url), str(path.relative_to(tmp_path / "a.zarr")), path.read_bytes())
    return StoreReader(tmp_path / "a.zarr"), url


def test_it_reads_what_a_disk_gives(stores) -> None:
    local, url = stores
    remote = pickle.loads(pickle.dumps(StoreReader(url)))
    assert (len(remote), remote.ids, remote.stored.tolist()) == (len(local), local.ids, local.stored.tolist())
    for index in range(len(local)):
        ours, theirs = remote.sample_as_numpy(index, verify=True), local.sample_as_numpy(index)
        for name in (*local.hidden_arrays, "input_ids", "loss_mask"):
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
    assert remote.sample(2, rows=(1, 4)).input_ids.tolist() == local.sample(2, rows=(1, 4)).input_ids.tolist()


def test_verify_takes_a_url(stores) -> None:
    outcome = CliRunner().invoke(app, ["verify", stores[1], "--json"])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["digests"]["checked"] == 3


def test_a_place_without_a_store_is_none(object_place) -> None:
    with pytest.raises(NotAStore, match=f"{object_place}/none.zarr is not a Statetap store"):
        StoreReader(f"{object_place}/none.zarr")


def test_an_object_store_that_fails_is_told_without_its_secrets(stores, object_store, monkeypatch) -> None:
    monkeypatch.setattr(object_stores, "RETRIES", 0)
    reader = StoreReader(stores[1])
    object_store.gate.faults.append(Fault("GET"))
    with pytest.raises(StoreReadError, match=r"sample 1: .* could not be read: .*503"):
        reader.sample(1)
    with pytest.raises(NotAStore, match="503") as refused:
        StoreReader(stores[1])
    assert SECRET not in str(refused.value)


def test_without_obstore_the_extra_is_named(object_place, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotAStore, match=r"pip install .*'statetap-client\[object-stores\]'"):
        StoreReader(f"{object_place}/a.zarr")
