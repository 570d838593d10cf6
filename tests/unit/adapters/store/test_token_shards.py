"""write_tokens: shard by shard, in place, the same again."""

import errno
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import zarr
from statetap.adapters.store import local_objects
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.ports import StoreError, StoreFull, TokenBlock
from statetap_client import layout

from tests.unit.adapters.store.test_zarr_store import make_plan, tree_of

SHARD = 1 << 16
ROWS = 3 * SHARD


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    """The layout's own are 16 times as long."""
    monkeypatch.setattr(layout, "TOKEN_ROWS_PER_SHARD", SHARD)
    monkeypatch.setattr(layout, "TOKEN_ROWS_PER_CHUNK", SHARD >> 4)


async def make_store(root: Path, rows: int = ROWS) -> ZarrStore:
    store = ZarrStore()
    await store.prepare(str(root), make_plan(rows=rows))
    return store


def block(row: int, count: int, first: int = 1) -> TokenBlock:
    return TokenBlock(row, np.arange(first, first + count, dtype=np.int32), np.ones(count, np.uint8))


def read(root: Path, name: str = "input_ids", rows: slice = slice(None)):
    return zarr.open_group(root, mode="r", use_consolidated=False)[name][rows]


async def test_blocks_land_at_their_rows_and_gaps_are_zero(tmp_path) -> None:
    store = await make_store(tmp_path / "s")
    blocks = [block(0, 5), block(8, 3), block(SHARD - 2, 5, first=100)]
    await store.write_tokens(str(tmp_path / "s"), iter(blocks))
    for name in ("input_ids", "loss_mask"):
        wanted = np.zeros(ROWS, np.int32)
        for written in blocks:
            wanted[written.row : written.row + len(written.input_ids)] = getattr(written, name)
        assert np.array_equal(read(tmp_path / "s", name), wanted)


async def test_new_shards_are_the_bytes_that_zarr_writes(tmp_path) -> None:
    random = np.random.default_rng(0)
    ids, mask = random.integers(0, 50_000, SHARD + 700, dtype=np.int32), random.integers(0, 2, SHARD + 700, dtype=np.uint8)
    store = await make_store(tmp_path / "ours", rows=2 * SHARD + 9)
    await make_store(tmp_path / "theirs", rows=2 * SHARD + 9)
    # Whole chunks of the second shard stay empty; the third is cut off by the array's end.
    blocks = [TokenBlock(5, ids, mask), TokenBlock(2 * SHARD + 2, ids[:7], mask[:7])]
    await store.write_tokens(str(tmp_path / "ours"), blocks)
    group = zarr.open_group(tmp_path / "theirs", mode="r+", use_consolidated=False)
    for name in ("input_ids", "loss_mask"):
        values = np.zeros(2 * SHARD + 9, np.int32)
        for written in blocks:
            values[written.row : written.row + len(written.input_ids)] = getattr(written, name)
        group[name][:] = values
    assert tree_of(tmp_path / "ours") == tree_of(tmp_path / "theirs")


async def test_writing_again_writes_the_same_bytes_and_nothing_twice(tmp_path, monkeypatch) -> None:
    store = await make_store(tmp_path / "s")
    blocks = [block(3, 10), block(SHARD + 1, 10)]
    await store.write_tokens(str(tmp_path / "s"), blocks)
    before = tree_of(tmp_path / "s")
    synced = []
    for name in ("sync_object", "replace_file"):
        monkeypatch.setattr(local_objects, name, lambda *written: synced.append(written))
    await store.write_tokens(str(tmp_path / "s"), blocks)
    assert tree_of(tmp_path / "s") == before
    assert synced == []


async def test_a_second_job_in_the_same_shard_leaves_the_first_alone(tmp_path) -> None:
    store = await make_store(tmp_path / "s")
    first, second = [block(0, 10)], [block(16, 10, first=50)]
    await store.write_tokens(str(tmp_path / "s"), first)
    await store.write_tokens(str(tmp_path / "s"), second)
    await store.write_tokens(str(tmp_path / "s"), first)
    assert read(tmp_path / "s", rows=slice(0, 26)).tolist() == [*range(1, 11), *[0] * 6, *range(50, 60)]


async def test_untouched_shards_have_no_object(tmp_path) -> None:
    store = await make_store(tmp_path / "s")
    await store.write_tokens(str(tmp_path / "s"), [block(2 * SHARD, 4)])
    assert [path.name for path in (tmp_path / "s" / "input_ids" / "c").iterdir()] == ["2"]


@pytest.mark.parametrize(
    "blocks",
    [
        [block(8, 4), block(0, 4)],
        [block(0, 4), block(3, 4)],
        [block(ROWS - 2, 4)],
        [TokenBlock(0, np.zeros(3, np.int32), np.zeros(2, np.uint8))],
    ],
)
async def test_blocks_that_break_the_ports_terms_are_refused(tmp_path, blocks) -> None:
    store = await make_store(tmp_path / "s")
    with pytest.raises(StoreError, match="token rows"):
        await store.write_tokens(str(tmp_path / "s"), blocks)


@pytest.mark.parametrize("shard", ["0", "2"])
async def test_a_shard_that_finds_no_room_is_told_whichever_it_is(tmp_path, monkeypatch, shard) -> None:
    store = await make_store(tmp_path / "s")
    replace_file = local_objects.replace_file

    def full(path: Path, data: bytes) -> None:
        if path.name == shard:
            raise OSError(errno.ENOSPC, "no space")
        replace_file(path, data)

    monkeypatch.setattr(local_objects, "replace_file", full)
    blocks = [block(0, 4), block(SHARD, 4), block(2 * SHARD, 4)]
    with pytest.raises(StoreFull, match="writing the tokens of"):
        await store.write_tokens(str(tmp_path / "s"), blocks)
    assert [thread.name for thread in threading.enumerate() if "token-writer" in thread.name] == []
    monkeypatch.setattr(local_objects, "replace_file", replace_file)
    await store.write_tokens(str(tmp_path / "s"), blocks)
    assert [int(read(tmp_path / "s", rows=slice(n * SHARD, n * SHARD + 4)).sum()) for n in range(3)] == [10, 10, 10]


async def test_blocks_are_held_for_one_shard_at_most(tmp_path) -> None:
    per_shard = 16
    store = await make_store(tmp_path / "s")
    alive: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
    most = 0

    def blocks():
        nonlocal most
        for row in range(0, ROWS, SHARD // per_shard):
            made = block(row, SHARD // per_shard)
            alive[id(made.input_ids)] = made.input_ids
            most = max(most, len(alive))
            yield made

    await store.write_tokens(str(tmp_path / "s"), blocks())
    assert most <= per_shard + 2
