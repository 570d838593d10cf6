"""One suite for the store's adapters and their fakes: Store, ShardWriter and CaptureInspector."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from statetap.adapters.store.shard_writers import ShardWriters
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.placement import Geometry
from statetap.core.spec import Compression
from statetap.ports import (
    CaptureInspector,
    CapturePart,
    SampleColumns,
    Segment,
    ShardWriter,
    Store,
    StoreError,
    StoreMismatch,
    StorePlan,
    TokenBlock,
    UnitWrite,
)

from tests.fakes.cluster import zarr_store
from tests.fakes.store import FakeInspector, FakeShardWriter, FakeStore
from tests.fakes.store_on_disk import AUX, LAST, as_view, attributes, hidden_arrays, random_rows

ARRAYS = hidden_arrays()


def bad_values(detail: str) -> Refusal:
    return Refusal(RefusalReason.BAD_VALUES, detail)


GEOMETRY = Geometry(rows_per_shard=8, rows_per_chunk=2, alignment=2)


@dataclass
class Kit:
    """A store, what writes to it, and a way to look at one of its arrays."""

    location: str
    store: Store
    writer: ShardWriter
    inspector: CaptureInspector
    read: Callable[[str], NDArray[Any]]


@pytest.fixture(params=["disk", "object store", "fake"])
def kit(request, tmp_path):
    location = str(tmp_path / "store")
    if request.param == "object store":
        location = f"{request.getfixturevalue('object_place')}/store"
    if request.param == "fake":
        store = FakeStore()

        def read_fake(name: str) -> NDArray[Any]:
            group = store.groups[location]
            if name.startswith("samples/"):
                return group.columns[name.removeprefix("samples/")]
            return group.hidden[name] if name in group.hidden else getattr(group, name)

        yield Kit(location, store, FakeShardWriter(store), FakeInspector(), read_fake)
        return
    writer, inspector = ShardWriters(parallel=2), ThreadedCaptureInspector()
    yield Kit(
        location,
        ZarrStore(),
        writer,
        inspector,
        lambda name: zarr.open_group(zarr_store(location), mode="r", use_consolidated=False)[name][:],
    )
    writer.close()
    inspector.close()


def make_plan(rows: int = 16, samples: int = 3, **changes: Any) -> StorePlan:
    return StorePlan(arrays=ARRAYS, geometry=GEOMETRY, rows=rows, samples=samples, attributes=attributes(**changes))


def make_unit(location: str, *, seed: int = 0, row_start: int = 0, rows: int = 8, spans=((0, 3), (4, 2))) -> UnitWrite:
    rng = np.random.default_rng(seed)
    segments = [Segment(array.name, row, as_view(random_rows(array, length, rng))) for array in ARRAYS for row, length in spans]
    return UnitWrite(
        location=location, arrays=ARRAYS, geometry=GEOMETRY, row_start=row_start, rows=rows, fence=1, segments=segments
    )


async def test_a_store_is_described_once_it_is_there(kit) -> None:
    assert await kit.store.describe(kit.location) is None
    await kit.store.prepare(kit.location, make_plan())
    facts = await kit.store.describe(kit.location)
    assert (facts.rows, facts.samples, facts.attributes) == (16, 3, attributes())
    free = await kit.store.free_bytes(kit.location)
    assert free is None if "://" in kit.location else free > 0


async def test_a_check_tells_what_would_not_fit_and_changes_nothing(kit) -> None:
    await kit.store.check(kit.location, make_plan())
    assert await kit.store.describe(kit.location) is None
    await kit.store.prepare(kit.location, make_plan())
    await kit.store.check(kit.location, make_plan(rows=24, samples=5, datasets=["b" * 64]))
    with pytest.raises(StoreMismatch) as caught:
        await kit.store.check(kit.location, make_plan(model_fingerprint="other"))
    assert caught.value.field == "model_fingerprint"
    facts = await kit.store.describe(kit.location)
    assert (facts.rows, facts.samples, facts.attributes) == (16, 3, attributes())


async def test_it_grows_and_never_shrinks(kit) -> None:
    await kit.store.prepare(kit.location, make_plan())
    await kit.store.prepare(kit.location, make_plan(rows=24, samples=5, datasets=["b" * 64], statetap_version="2"))
    await kit.store.prepare(kit.location, make_plan(rows=8, samples=1))
    facts = await kit.store.describe(kit.location)
    assert (facts.rows, facts.samples) == (24, 5)
    assert facts.attributes["datasets"] == ["a" * 64, "b" * 64]


@pytest.mark.parametrize("changes", [{"model_fingerprint": "other"}, {"final": "none"}, {"rows_per_shard": 16}])
async def test_it_refuses_another_model_spec_or_layout(kit, changes) -> None:
    await kit.store.prepare(kit.location, make_plan())
    with pytest.raises(StoreMismatch) as caught:
        await kit.store.prepare(kit.location, make_plan(**changes))
    assert caught.value.field == next(iter(changes))


@pytest.mark.parametrize(("stored", "wanted"), [("zstd", "none"), ("none", "zstd")])
async def test_it_refuses_another_compression_by_its_name(kit, stored, wanted) -> None:
    plans = {name: replace(make_plan(), compression=Compression(name)) for name in (stored, wanted)}
    await kit.store.prepare(kit.location, plans[stored])
    await kit.store.prepare(kit.location, plans[stored])
    for refusing in (kit.store.check, kit.store.prepare):
        with pytest.raises(StoreMismatch, match=f"the store has compression = '{stored}', the job needs '{wanted}'"):
            await refusing(kit.location, plans[wanted])


async def test_tokens(kit) -> None:
    await kit.store.prepare(kit.location, make_plan())
    blocks = [
        TokenBlock(2, np.array([5, 6, 7], np.int32), np.array([0, 1, 1], np.uint8)),
        TokenBlock(8, np.array([9], np.int32), np.array([1], np.uint8)),
    ]
    for _ in range(2):
        await kit.store.write_tokens(kit.location, blocks)
    assert kit.read("input_ids").tolist() == [0, 0, 5, 6, 7, 0, 0, 0, 9, *[0] * 7]
    assert kit.read("loss_mask").tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, *[0] * 7]
    with pytest.raises(StoreError):
        await kit.store.write_tokens(kit.location, blocks[::-1])


async def test_samples(kit) -> None:
    await kit.store.prepare(kit.location, make_plan())
    assert kit.read("samples/status").tolist() == [0, 0, 0]
    assert kit.read("samples/next_token").tolist() == [-1, -1, -1]
    columns = SampleColumns(
        first=1,
        ids=["b", "c"],
        row_start=np.array([4, 8], np.int64),
        length=np.array([2, 3], np.int32),
        status=np.array([1, 2], np.uint8),
        next_token=np.array([7, -1], np.int32),
        digest=np.array([2**64 - 1, 0], np.uint64),
    )
    await kit.store.write_samples(kit.location, columns)
    assert kit.read("samples/id").tolist() == ["", "b", "c"]
    assert kit.read("samples/digest").tolist() == [0, 2**64 - 1, 0]
    assert kit.read("samples/status").tolist() == [0, 1, 2]


@pytest.mark.parametrize("compression", Compression)
async def test_a_units_rows_are_read_as_written(kit, compression) -> None:
    await kit.store.prepare(kit.location, replace(make_plan(), compression=compression))
    unit = replace(make_unit(kit.location, row_start=8), compression=compression)
    objects = await kit.writer.write(unit)
    assert [o.key for o in objects] == [f"{AUX}/c/1/0/0", f"{LAST}/c/1/0", "last_hidden_states_prenorm/c/1/0"]
    for array in ARRAYS:
        stored = kit.read(array.name)
        untouched = np.ones(16, bool)
        for segment in (s for s in unit.segments if s.array == array.name):
            rows = slice(8 + segment.row, 8 + segment.row + len(segment.data) // array.row_bytes)
            assert stored[rows].tobytes() == bytes(segment.data)
            untouched[rows] = False
        assert not stored[untouched].any()


async def test_writing_again_is_adopted_other_bytes_are_not(kit) -> None:
    await kit.store.prepare(kit.location, make_plan())
    objects = await kit.writer.write(make_unit(kit.location))
    assert await kit.writer.write(make_unit(kit.location)) == objects
    before = kit.read(AUX).tobytes()
    with pytest.raises(StoreError, match="is there already, with other bytes"):
        await kit.writer.write(make_unit(kit.location, seed=1))
    assert kit.read(AUX).tobytes() == before


async def test_discard_empties_the_unit_and_nothing_else(kit) -> None:
    await kit.store.prepare(kit.location, make_plan())
    await kit.writer.write(make_unit(kit.location))
    await kit.writer.write(make_unit(kit.location, row_start=8))
    kept = kit.read(AUX)[8:].tobytes()
    for _ in range(2):
        await kit.writer.discard(kit.location, ARRAYS, GEOMETRY, 0, 8)
    assert not kit.read(AUX)[:8].any()
    assert kit.read(AUX)[8:].tobytes() == kept
    await kit.writer.write(make_unit(kit.location, seed=1))


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        (None, None),
        (np.nan, bad_values("last_hidden_states: row 4 is not finite")),
        (0, bad_values("last_hidden_states: row 4 is all zero")),
        (3, bad_values("last_hidden_states: row 4 is constant")),
    ],
)
async def test_inspection(kit, value, refusal) -> None:
    rng = np.random.default_rng(0)
    capture = {array.name: random_rows(array, 6, rng) for array in ARRAYS}
    if value is not None:
        capture[LAST][4] = value
    spans = (slice(0, 2), slice(2, 6))
    parts = [CapturePart({name: as_view(rows[span]) for name, rows in capture.items()}) for span in spans]
    report = await kit.inspector.inspect(parts, ARRAYS)
    assert report.refusal == refusal
    assert report.digest == await kit.inspector.digest({name: as_view(rows) for name, rows in capture.items()})
    if refusal is not None:
        assert report.norms == ()
        return
    for array, norms in zip(ARRAYS, report.norms, strict=True):
        wanted = np.linalg.norm(capture[array.name][[0, 5]].astype(np.float64), axis=-1).reshape(2, -1)
        assert (norms.array, norms.rows) == (array.name, (0, 5))
        np.testing.assert_allclose(np.array(norms.norms), wanted, rtol=1e-5)


async def test_one_dead_layer_is_named(kit) -> None:
    rng = np.random.default_rng(0)
    capture = {array.name: random_rows(array, 6, rng) for array in ARRAYS}
    capture[AUX][1, 1] = 0
    report = await kit.inspector.inspect([CapturePart({name: as_view(rows) for name, rows in capture.items()})], ARRAYS)
    assert report.refusal == bad_values("aux_hidden_states: row 1 is all zero in layer 2 of 2")


@pytest.mark.parametrize("torn", [False, True])
async def test_rows_are_compared_with_their_checksums(kit, torn) -> None:
    rng = np.random.default_rng(0)
    capture = {array.name: random_rows(array, 6, rng) for array in ARRAYS}
    sums = sum(rows.view(np.int64).reshape(6, -1).sum(axis=1) for rows in capture.values())
    if torn:
        capture[AUX][4, 0] = capture[AUX][3, 0]
    parts = [
        CapturePart({name: as_view(rows[span]) for name, rows in capture.items()}, as_view(sums[span]))
        for span in (slice(0, 2), slice(2, 6))
    ]
    detail = "1 rows, the first of them row 4, are not what their source computed"
    wanted = Refusal(RefusalReason.WRONG_CHECKSUM, detail) if torn else None
    assert (await kit.inspector.inspect(parts, ARRAYS)).refusal == wanted


class TestFaults:
    """What only the fakes do."""

    async def test_each_raises_once_when_told(self) -> None:
        store = FakeStore()
        store.fail_once("prepare", StoreError("broken"))
        with pytest.raises(StoreError, match="broken"):
            await store.prepare("/s", make_plan())
        assert await store.describe("/s") is None
        await store.prepare("/s", make_plan())
        writer = FakeShardWriter(store)
        writer.fail_once("write", StoreError("broken"))
        with pytest.raises(StoreError, match="broken"):
            await writer.write(make_unit("/s"))
        assert store.groups["/s"].objects == {}
        await writer.write(make_unit("/s"))
        assert len(writer.written) == 1

    async def test_the_inspector_refuses_once_when_told(self) -> None:
        inspector = FakeInspector()
        inspector.refuse_once("because")
        rng = np.random.default_rng(0)
        part = CapturePart({array.name: as_view(random_rows(array, 2, rng)) for array in ARRAYS})
        assert (await inspector.inspect([part], ARRAYS)).refusal == bad_values("because")
        assert (await inspector.inspect([part], ARRAYS)).refusal is None

    def test_a_method_that_is_not_there_cannot_fail(self) -> None:
        with pytest.raises(ValueError, match="no method 'wrote'"):
            FakeStore().fail_once("wrote", StoreError("x"))
