"""RemoteShardWriter against a served object store: never replacing, lost answers, servers that fail, cancellation."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url
from statetap.adapters.store import remote_objects
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.object_files import WriteWay
from statetap.adapters.store.remote_shard_writer import RemoteShardWriter
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.core.spec import Compression
from statetap.ports import StoreError, StorePlan, UnitWrite
from statetap_client import object_stores

from tests.fakes.object_store import SECRET, Fault
from tests.fakes.store_on_disk import AUX, LAST, attributes
from tests.unit.adapters.store.test_local_shard_writer import ARRAYS, GEOMETRY, files_of, make_unit

FIRST = f"{AUX}/c/0/0/0"


@pytest.fixture(autouse=True)
def few_tries(monkeypatch) -> None:
    monkeypatch.setattr(object_stores, "RETRIES", 1)


@pytest.fixture
def location(object_place) -> str:
    return f"{object_place}/run.zarr"


@pytest.fixture
def writer():
    writer = RemoteShardWriter(parallel=2)
    yield writer
    writer.close()


def objects_of(location: str) -> dict[str, bytes]:
    store = from_url(location)
    keys = [found["path"] for found in obstore.list(store).collect()]
    return {key: bytes(obstore.get(store, key).bytes()) for key in keys}


def is_shard(method: str, path: str) -> bool:
    return method == "PUT" and "/c/" in path


async def on_disk(unit: UnitWrite, folder: Path) -> dict[str, bytes]:
    """The objects that it becomes on a disk."""
    local = LocalShardWriter(way=lambda _: WriteWay())
    await local.write(replace(unit, location=str(folder)))
    local.close()
    return files_of(str(folder))


@pytest.mark.parametrize("compression", Compression)
async def test_the_objects_are_those_of_a_disk(location, writer, tmp_path, compression) -> None:
    unit = replace(make_unit(location, rows=16, filled=11), compression=compression)
    wanted = await on_disk(unit, tmp_path)
    objects = await writer.write(unit)
    assert objects_of(location) == wanted
    assert {o.key: o.nbytes for o in objects} == {key: len(data) for key, data in wanted.items()}


async def test_every_object_is_sent_in_one_put_that_does_not_replace(location, writer, object_store) -> None:
    await writer.write(make_unit(location, rows=16, filled=11))
    sent = [(path, condition) for method, path, condition in object_store.gate.requests if is_shard(method, path)]
    assert len(sent) == 4
    assert {condition for _, condition in sent} == {"*"}


async def test_the_same_bytes_are_adopted_and_others_are_never_replaced(location, writer) -> None:
    first = await writer.write(make_unit(location, fence=1))
    before = objects_of(location)
    assert await writer.write(make_unit(location, fence=2)) == first
    with pytest.raises(StoreError, match=f"{location}/{AUX}/c/0/0/0 is there already, with other bytes.*discard the unit first"):
        await writer.write(make_unit(location, seed=1, fence=2))
    assert objects_of(location) == before


async def test_a_refusal_at_one_array_takes_back_the_other(location, writer) -> None:
    await writer.write(make_unit(location, seed=0))
    obstore.delete(from_url(location), FIRST)
    before = objects_of(location)
    with pytest.raises(StoreError, match=LAST):
        await writer.write(make_unit(location, seed=1, fence=2))
    assert objects_of(location) == before


async def test_discard_makes_room_for_another_attempt(location, writer) -> None:
    await writer.write(make_unit(location, seed=0))
    await writer.write(make_unit(location, row_start=8))
    await writer.discard(location, ARRAYS, GEOMETRY, 0, 8)
    assert set(objects_of(location)) == {f"{AUX}/c/1/0/0", f"{LAST}/c/1/0"}
    await writer.discard(location, ARRAYS, GEOMETRY, 0, 8)
    await writer.write(make_unit(location, seed=1))


async def test_two_writers_at_once_leave_one_of_the_two(location, writer, tmp_path) -> None:
    """However their PUTs come: each ends whole with one's bytes, and the other is told, or took its own back."""
    units = [make_unit(location, seed=seed, fence=1 + seed) for seed in range(2)]
    outcomes = await asyncio.gather(*map(writer.write, units), return_exceptions=True)
    assert all(isinstance(outcome, StoreError) for outcome in outcomes if isinstance(outcome, BaseException))
    won = [unit for unit, outcome in zip(units, outcomes, strict=True) if not isinstance(outcome, BaseException)]
    assert len(won) <= 1
    assert objects_of(location) == (await on_disk(won[0], tmp_path) if won else {})


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down", "403 Forbidden"])
async def test_a_server_that_fails_is_a_store_error_that_names_the_place(location, writer, object_store, status) -> None:
    object_store.gate.faults.append(Fault("PUT", LAST + "/c/0/0", status))
    with pytest.raises(StoreError, match=f"writing {LAST}/c/0/0 of {location} failed: .*{status[:3]}") as refused:
        await writer.write(make_unit(location))
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)
    object_store.gate.faults.clear()
    assert objects_of(location) == {}
    await writer.write(make_unit(location))


async def test_one_failure_is_tried_again_at_once(location, writer, object_store) -> None:
    object_store.gate.faults.append(Fault("PUT", FIRST, times=1))
    assert {o.key for o in await writer.write(make_unit(location))} == set(objects_of(location))


async def test_nobody_listening_is_a_store_error(location, writer, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=f"of {location} failed: "):
        await writer.write(make_unit(location))
    with pytest.raises(StoreError, match=f"reading {location} failed: "):
        await ZarrStore().describe(location)


@pytest.mark.parametrize("times", [1, 1 << 30], ids=["then-refused", "always"])
async def test_an_object_whose_answer_is_lost_is_taken_as_written(location, writer, object_store, times, tmp_path) -> None:
    """The second try of its PUT is refused by the first's object; without one, what is there is looked at."""
    object_store.gate.faults.append(Fault("PUT", FIRST, "500 Internal Server Error", after=True, times=times))
    await writer.write(unit := make_unit(location))
    assert objects_of(location) == await on_disk(unit, tmp_path)


async def test_a_lost_answer_with_anothers_object_there_fails(location, writer, object_store) -> None:
    await writer.write(make_unit(location, seed=0))
    before = objects_of(location)
    object_store.gate.faults.append(Fault("PUT", FIRST, "500 Internal Server Error", after=True))
    with pytest.raises(StoreError, match=location):
        await writer.write(make_unit(location, seed=1, fence=2))
    object_store.gate.faults.clear()
    assert objects_of(location) == before


async def test_a_cancelled_attempt_leaves_nothing(location, writer, object_store) -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if is_shard(method, path) and path.endswith(f"{LAST}/c/0/0"):
            started.set()
            go_on.wait(30)

    object_store.gate.before = hold
    task = asyncio.create_task(writer.write(make_unit(location)))
    assert await asyncio.to_thread(started.wait, 30)
    task.cancel()
    await asyncio.wait([task], timeout=0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert objects_of(location) == {}


async def test_no_more_shards_are_in_memory_than_told(location, object_store, monkeypatch) -> None:
    held, most, lock = 0, 0, threading.Lock()

    class Counted(remote_objects.RemoteObjects):
        def create(self, key, data) -> bool:
            nonlocal held, most
            with lock:
                held += 1
                most = max(most, held)
            try:
                return super().create(key, data)
            finally:
                with lock:
                    held -= 1

    monkeypatch.setattr(remote_objects, "RemoteObjects", Counted)
    writer = RemoteShardWriter(parallel=1)
    await asyncio.gather(*(writer.write(make_unit(location, row_start=8 * i)) for i in range(3)))
    assert most == 1
    writer.close()


async def test_shards_too_large_for_one_put_are_refused_with_figures(location) -> None:
    geometry = Geometry(rows_per_shard=1 << 30, rows_per_chunk=1 << 20, alignment=1)
    plan = StorePlan(arrays=ARRAYS, geometry=geometry, rows=0, samples=0, attributes=attributes())
    with pytest.raises(
        StoreError, match=r"17,1\d\d,\d{3},\d{3} bytes .* 5,368,709,120 at most: .*rows_per_shard of 33[\d,]+ or less"
    ):
        await ZarrStore().check(location, plan)
    await ZarrStore().check(location, replace(plan, geometry=replace(geometry, rows_per_shard=1 << 20)))


async def test_a_store_inside_a_store_is_refused(location) -> None:
    plan = StorePlan(arrays=ARRAYS, geometry=GEOMETRY, rows=8, samples=1, attributes=attributes())
    await ZarrStore().prepare(location, plan)
    with pytest.raises(StoreError, match=f"lies inside the store {location}: put it beside it"):
        await ZarrStore().describe(f"{location}/deep/b.zarr")
    with pytest.raises(StoreError, match="is not empty and no Statetap store"):
        await ZarrStore().describe(str(Path(location).parent).replace(":/", "://"))


async def test_without_obstore_the_way_out_is_named(location, writer, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "statetap.adapters.store.remote_objects", None)
    with pytest.raises(StoreError, match=r"pip install 'statetap\[object-stores\]'"):
        await writer.write(make_unit(location))
