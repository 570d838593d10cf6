"""Object stores get the same bytes as disks, whatever the unit: shapes, holes, compression."""

import asyncio
import tempfile
from dataclasses import replace
from itertools import count

import obstore
import pytest
from hypothesis import given, settings
from obstore.store import from_url
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.object_files import WriteWay
from statetap.adapters.store.remote_shard_writer import RemoteShardWriter

from tests.property.test_store import made, units
from tests.unit.adapters.store.test_local_shard_writer import files_of

_numbers = count()


@pytest.fixture(scope="module")
def place(served_objects):
    """As `object_store`, for a whole module: Hypothesis takes no fixtures of single tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in served_objects.environment.items():
            patch.setenv(name, value)
        yield f"{served_objects.url}/property"


@settings(max_examples=25, deadline=None)
@given(unit=units())
def test_an_object_store_gets_the_bytes_that_a_disk_gets(place, unit) -> None:
    location = f"{place}/{next(_numbers)}"
    write, _ = made(location, unit)

    async def run(folder: str) -> None:
        local, remote = LocalShardWriter(way=lambda _: WriteWay()), RemoteShardWriter()
        try:
            assert await remote.write(write) == await local.write(replace(write, location=folder))
        finally:
            local.close()
            remote.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))
        store = from_url(location)
        found = {entry["path"]: bytes(obstore.get(store, entry["path"]).bytes()) for entry in obstore.list(store).collect()}
        assert found == files_of(folder)
