"""What the store's adapters say is done survives a power cut, and no power cut leaves half of an object under its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import Segment, StorePlan, TokenBlock, UnitWrite

from tests.fakes.power_cut import power_cut
from tests.fakes.store_on_disk import AUX, LAST, as_view, attributes, random_rows
from tests.fakes.write_ways import WAYS, find_way

ARRAYS = (HiddenArray(AUX, (2, 4), "bfloat16"), HiddenArray(LAST, (4,), "bfloat16"))
GEOMETRY = Geometry(rows_per_shard=8, rows_per_chunk=2, alignment=2)
PLAN = StorePlan(arrays=ARRAYS, geometry=GEOMETRY, rows=32, samples=1, attributes=attributes())


@pytest.fixture(params=WAYS)
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalShardWriter]:
    way = find_way(request.param, tmp_path)
    writer = LocalShardWriter(way=lambda _: way)
    yield writer
    writer.close()


@pytest.fixture(params=Compression)
def compression(request: pytest.FixtureRequest) -> Compression:
    return request.param


def unit_of(root: Path, compression: Compression) -> UnitWrite:
    random = np.random.default_rng(0)
    segments = [Segment(array.name, 0, as_view(random_rows(array, 11, random))) for array in ARRAYS]
    return UnitWrite(
        location=str(root),
        arrays=ARRAYS,
        geometry=GEOMETRY,
        row_start=0,
        rows=16,
        fence=1,
        segments=segments,
        compression=compression,
    )


def objects(files: dict[str, bytes]) -> dict[str, bytes]:
    """The shard objects under their names."""
    return {name: data for name, data in files.items() if "/c/" in name and not Path(name).name.startswith(".")}


def restored(files: dict[str, bytes], to: Path) -> Path:
    for name, data in files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(data)
    return to


async def test_what_a_commit_may_be_recorded_of_survives(tmp_path, writer, compression, monkeypatch) -> None:
    root = tmp_path / "store"
    await ZarrStore().prepare(str(root), replace(PLAN, compression=compression))
    with power_cut(monkeypatch, root) as cut:
        written = await writer.write(unit_of(root, compression))
    left = cut.leaves()
    assert {o.key: left.get(o.key) for o in written} == {o.key: (root / o.key).read_bytes() for o in written}


async def test_no_moment_leaves_half_of_an_object_under_its_name(tmp_path, writer, compression, monkeypatch) -> None:
    root = tmp_path / "store"
    await ZarrStore().prepare(str(root), replace(PLAN, compression=compression))
    seen: list[dict[str, bytes]] = []

    with power_cut(monkeypatch, root, lambda cut: seen.append(objects(cut.leaves()))) as cut:
        await writer.write(unit_of(root, compression))
    whole = objects(cut.leaves())
    assert len(seen) == cut.syncs > 2 * len(whole) > 0
    assert all(whole[name] == data for left in seen for name, data in left.items())


async def test_a_prepared_store_and_its_tokens_survive(tmp_path, monkeypatch) -> None:
    root = tmp_path / "store"
    store = ZarrStore()

    with power_cut(monkeypatch, tmp_path) as cut:
        await store.prepare(str(root), PLAN)
        tokens, mask = np.arange(1, 12, dtype=np.int32), np.ones(11, np.uint8)
        await store.write_tokens(str(root), iter([TokenBlock(0, tokens, mask)]))
    group = zarr.open_group(str(restored(cut.leaves(), tmp_path / "after") / "store"), mode="r", use_consolidated=False)
    assert group["input_ids"][:11].tolist() == tokens.tolist()
    assert group["loss_mask"][:11].tolist() == mask.tolist()
    assert group[AUX].shape == (32, 2, 4)


async def test_the_layer_forgets_what_was_not_synced(tmp_path, monkeypatch) -> None:
    """The layer itself: without a sync neither bytes nor names are there."""
    with power_cut(monkeypatch, tmp_path) as cut:
        (tmp_path / "file").write_bytes(b"lost")
    assert cut.leaves() == {}
