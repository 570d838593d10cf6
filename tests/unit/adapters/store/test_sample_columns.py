"""write_samples: runs of the projection."""

from pathlib import Path

import numpy as np
import pytest
import zarr
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.ports import SampleColumns, StoreError
from statetap_client import layout

from tests.unit.adapters.store.test_zarr_store import make_plan, tree_of

SAMPLES = layout.SAMPLES_PER_CHUNK + 100


def columns(first: int, count: int, status: int = 1) -> SampleColumns:
    numbers = np.arange(first, first + count)
    return SampleColumns(
        first=first,
        ids=[f"id-{number}-é" for number in numbers],
        row_start=numbers * 8,
        length=(numbers + 1).astype(np.int32),
        status=np.full(count, status, np.uint8),
        next_token=numbers.astype(np.int32),
        digest=numbers.astype(np.uint64) + np.uint64(1 << 63),
    )


async def make_store(root: Path) -> ZarrStore:
    store = ZarrStore()
    await store.prepare(str(root), make_plan(samples=SAMPLES))
    return store


def read(root: Path, name: str):
    return zarr.open_group(root, mode="r", use_consolidated=False)[f"samples/{name}"][:]


@pytest.mark.parametrize("first", [0, 50, layout.SAMPLES_PER_CHUNK - 5, SAMPLES - 10])
async def test_a_run_lands_at_its_place(tmp_path, first) -> None:
    store = await make_store(tmp_path / "s")
    wanted = columns(first, 10)
    await store.write_samples(str(tmp_path / "s"), wanted)
    for name in layout.SAMPLE_ARRAYS:
        stored = read(tmp_path / "s", name)
        assert stored[first : first + 10].tolist() == list(getattr(wanted, "ids" if name == "id" else name))
        fill = {"id": "", "next_token": -1}.get(name, 0)
        assert set(stored[:first].tolist()) | set(stored[first + 10 :].tolist()) <= {fill}


async def test_later_runs_replace_earlier_ones(tmp_path) -> None:
    store = await make_store(tmp_path / "s")
    await store.write_samples(str(tmp_path / "s"), columns(0, 10, status=0))
    await store.write_samples(str(tmp_path / "s"), columns(4, 3, status=2))
    assert read(tmp_path / "s", "status")[:10].tolist() == [0, 0, 0, 0, 2, 2, 2, 0, 0, 0]
    assert read(tmp_path / "s", "id")[9] == "id-9-é"


async def test_same_inputs_same_bytes(tmp_path) -> None:
    for name in ("a", "b"):
        store = await make_store(tmp_path / name)
        await store.write_samples(str(tmp_path / name), columns(0, SAMPLES))
    await store.write_samples(str(tmp_path / "b"), columns(7, 9))
    assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")


async def test_an_empty_run_does_nothing(tmp_path) -> None:
    store = await make_store(tmp_path / "s")
    before = tree_of(tmp_path / "s")
    await store.write_samples(str(tmp_path / "s"), columns(0, 0))
    assert tree_of(tmp_path / "s") == before


async def test_a_run_beyond_the_store_is_refused(tmp_path) -> None:
    store = await make_store(tmp_path / "s")
    with pytest.raises(StoreError, match="go beyond the"):
        await store.write_samples(str(tmp_path / "s"), columns(SAMPLES - 1, 2))
