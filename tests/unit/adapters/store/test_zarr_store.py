"""ZarrStore's metadata: creation, growth, mismatches, cuts at every step, sameness of bytes."""

import errno
import json
import os
from pathlib import Path

import pytest
import xarray
import zarr
from statetap.adapters.store import durable_files, local_objects
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.core.spec import HiddenArray
from statetap.ports import StoreError, StoreFull, StoreMismatch, StorePlan

from tests.fakes.store_on_disk import AUX, LAST, attributes, hidden_arrays

GEOMETRY = Geometry(rows_per_shard=8, rows_per_chunk=2, alignment=2)


def make_plan(*, rows: int = 16, samples: int = 3, arrays=None, geometry=GEOMETRY, **changes) -> StorePlan:
    return StorePlan(
        arrays=arrays or hidden_arrays(), geometry=geometry, rows=rows, samples=samples, attributes=attributes(**changes)
    )


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


async def test_a_new_store_holds_exactly_the_contract(tmp_path) -> None:
    root = tmp_path / "a" / "store"
    await ZarrStore().prepare(str(root), make_plan())
    group = zarr.open_group(root, mode="r", use_consolidated=False)
    assert dict(group.attrs) == {"statetap": attributes()}
    shapes = {path: (array.shape, str(array.dtype)) for path, array in group.members(max_depth=None) if path != "samples"}
    assert shapes == {
        AUX: ((16, 2, 8), "bfloat16"),
        LAST: ((16, 8), "bfloat16"),
        "last_hidden_states_prenorm": ((16, 8), "bfloat16"),
        "input_ids": ((16,), "int32"),
        "loss_mask": ((16,), "uint8"),
        "samples/id": ((3,), "StringDType()"),
        "samples/row_start": ((3,), "int64"),
        "samples/length": ((3,), "int32"),
        "samples/status": ((3,), "uint8"),
        "samples/next_token": ((3,), "int32"),
        "samples/digest": ((3,), "uint64"),
    }
    assert group[AUX].shards == (8, 2, 8)
    assert group[AUX].chunks == (2, 2, 8)
    assert "consolidated" not in (root / "zarr.json").read_text()


async def test_xarray_opens_it_as_a_tree(tmp_path) -> None:
    await ZarrStore().prepare(str(tmp_path / "s"), make_plan())
    tree = xarray.open_datatree(tmp_path / "s", engine="zarr", consolidated=False)
    assert tree[AUX].dims == ("token", "layer", "hidden")
    assert tree["samples/status"].dims == ("sample",)
    assert xarray.open_zarr(tmp_path / "s", consolidated=False)[LAST].dtype.name == "bfloat16"


async def test_describe(tmp_path) -> None:
    store = ZarrStore()
    assert await store.describe(str(tmp_path / "nothing")) is None
    assert await store.describe(str(tmp_path)) is None
    await store.prepare(str(tmp_path / "s"), make_plan())
    facts = await store.describe(str(tmp_path / "s"))
    assert (facts.rows, facts.samples, facts.attributes) == (16, 3, attributes())


async def test_same_inputs_same_bytes(tmp_path) -> None:
    store = ZarrStore()
    reordered = StorePlan(
        arrays=hidden_arrays(), geometry=GEOMETRY, rows=16, samples=3, attributes=dict(reversed(attributes().items()))
    )
    await store.prepare(str(tmp_path / "a"), make_plan())
    await store.prepare(str(tmp_path / "b"), reordered)
    assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")
    await store.prepare(str(tmp_path / "a"), make_plan())
    assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")


async def test_growth_keeps_data_and_adds_the_dataset(tmp_path) -> None:
    store, root = ZarrStore(), tmp_path / "s"
    await store.prepare(str(root), make_plan())
    zarr.open_group(root, mode="r+", use_consolidated=False)[LAST][0:8] = 1
    await store.prepare(str(root), make_plan(rows=40, samples=9, datasets=["b" * 64], statetap_version="9.9.9"))
    facts = await store.describe(str(root))
    assert (facts.rows, facts.samples) == (40, 9)
    assert facts.attributes["datasets"] == ["a" * 64, "b" * 64]
    assert facts.attributes["statetap_version"] == "0.1.0"
    last = zarr.open_group(root, mode="r", use_consolidated=False)[LAST]
    assert (last[0:8] == 1).all()
    assert not last[8:].any()


async def test_a_smaller_plan_shrinks_nothing(tmp_path) -> None:
    store = ZarrStore()
    await store.prepare(str(tmp_path / "s"), make_plan())
    await store.prepare(str(tmp_path / "s"), make_plan(rows=8, samples=1))
    facts = await store.describe(str(tmp_path / "s"))
    assert (facts.rows, facts.samples) == (16, 3)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (make_plan(model_fingerprint="other"), "model_fingerprint"),
        (make_plan(aux_layer_ids=[0, 2]), "aux_layer_ids"),
        (make_plan(extra="new"), "extra"),
        (make_plan(geometry=Geometry(16, 2, 2)), f"{AUX}: chunk_grid"),
        (make_plan(geometry=Geometry(8, 4, 2)), f"{AUX}: codecs"),
        (make_plan(arrays=hidden_arrays("float16")), f"{AUX}: data_type"),
        (make_plan(arrays=hidden_arrays()[:2]), "arrays"),
    ],
)
async def test_a_plan_for_something_else_is_refused_and_touches_nothing(tmp_path, plan, field) -> None:
    store = ZarrStore()
    await store.prepare(str(tmp_path / "s"), make_plan())
    before = tree_of(tmp_path / "s")
    with pytest.raises(StoreMismatch, match="use another store") as caught:
        await store.prepare(str(tmp_path / "s"), plan)
    assert caught.value.field == field
    assert tree_of(tmp_path / "s") == before


async def test_tuples_in_attributes_are_lists_in_the_store(tmp_path) -> None:
    store = ZarrStore()
    await store.prepare(str(tmp_path / "s"), make_plan(aux_layer_ids=(0, 1)))
    await store.prepare(str(tmp_path / "s"), make_plan(aux_layer_ids=(0, 1)))


@pytest.mark.parametrize("content", ["a file", "a zarr group", "notes", "other version", "broken"])
async def test_something_else_is_never_taken_for_a_store(tmp_path, content) -> None:
    root = tmp_path / "s"
    if content == "a file":
        root.write_text("hello")
    elif content == "a zarr group":
        zarr.create_group(root)
    else:
        root.mkdir()
        document = json.dumps({"node_type": "group", "attributes": {"statetap": {"format_version": 2}}})
        name = "notes.txt" if content == "notes" else "zarr.json"
        (root / name).write_text("{" if content == "broken" else document)
    for call in (ZarrStore().describe(str(root)), ZarrStore().prepare(str(root), make_plan())):
        with pytest.raises(StoreError, match=r"another|empty it"):
            await call


async def test_a_creation_cut_short_anywhere_is_finished_by_the_next(tmp_path, monkeypatch) -> None:
    """Fails the n-th replacement of a metadata file, for every n there is."""
    store, whole = ZarrStore(), tmp_path / "whole"
    await store.prepare(str(whole), make_plan())
    replace_file = durable_files.replace_file
    for cut in range(len(tree_of(whole))):
        left = cut

        def failing(path: Path, data: bytes) -> None:
            nonlocal left
            if left == 0:
                # As a kill would leave it.
                path.with_name(f".{path.name}.partial").write_bytes(data[:10])
                raise OSError(errno.ENOSPC, "No space left on device")
            left -= 1
            replace_file(path, data)

        root = tmp_path / f"cut-{cut}"
        monkeypatch.setattr(local_objects, "replace_file", failing)
        with pytest.raises(StoreFull):
            await store.prepare(str(root), make_plan())
        monkeypatch.undo()
        facts = await store.describe(str(root))
        assert facts is None if cut == 0 else (facts.rows, facts.samples) == (0, 0)
        await store.prepare(str(root), make_plan())
        assert tree_of(root) == tree_of(whole)


async def test_a_growth_cut_short_anywhere_does_not_count_and_is_finished_by_the_next(tmp_path, monkeypatch) -> None:
    store, replace_file = ZarrStore(), durable_files.replace_file
    grown = make_plan(rows=40, samples=9, datasets=["b" * 64])
    for cut in range(1, 12):
        root, left = tmp_path / f"cut-{cut}", cut
        await store.prepare(str(root), make_plan())

        def failing(path: Path, data: bytes) -> None:
            nonlocal left
            if left == 0:
                raise OSError(errno.EIO, "Input/output error")
            left -= 1
            replace_file(path, data)

        monkeypatch.setattr(local_objects, "replace_file", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            await store.prepare(str(root), grown)
        monkeypatch.undo()
        facts = await store.describe(str(root))
        assert facts.samples == 3
        await store.prepare(str(root), grown)
        facts = await store.describe(str(root))
        assert (facts.rows, facts.samples) == (40, 9)
        assert facts.attributes["datasets"] == ["a" * 64, "b" * 64]


async def test_a_whole_store_that_lost_an_array_is_not_mended_in_silence(tmp_path) -> None:
    await ZarrStore().prepare(str(tmp_path / "s"), make_plan())
    (tmp_path / "s" / LAST / "zarr.json").unlink()
    with pytest.raises(StoreError, match="has lost last_hidden_states"):
        await ZarrStore().prepare(str(tmp_path / "s"), make_plan())


async def test_free_bytes_of_a_place_that_is_not_there_yet(tmp_path) -> None:
    space = os.statvfs(tmp_path)
    free = await ZarrStore().free_bytes(str(tmp_path / "not" / "yet"))
    assert 0 < free <= space.f_blocks * space.f_frsize


async def test_arrays_of_one_kind_alone(tmp_path) -> None:
    only = (HiddenArray(LAST, (8,), "float32"),)
    await ZarrStore().prepare(str(tmp_path / "s"), make_plan(arrays=only, dtype="float32", aux_layer_ids=[]))
    assert AUX not in zarr.open_group(tmp_path / "s", mode="r", use_consolidated=False)
