"""From dumps in shared memory to durable shards, against `cp` and against how others write the same samples."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from statetap.adapters.store import object_files
from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.object_files import ObjectFile, WriteWay
from statetap.adapters.store.shard_assembly import ShardPlan, plan_shards
from statetap.adapters.store.shard_objects import write_object
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.adapters.store.write_ways import past_the_page_cache, ways
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart, UnitWrite
from statetap_sglang.format import ROW_CHECKSUMS
from statetap_sglang.reader import MappedDump

from tests.bench import peers
from tests.bench.interleaved import Measured, Way, measure, times_faster
from tests.bench.material import Material
from tests.bench.null_file import NullFile
from tests.bench.rows import Row

CP = "cp + fsync"
OURS = "shards, digests and checks"
BARE = "shards, bytes alone"
PAST = "shards straight past the page cache, digests and checks"
BARE_PAST = "shards straight past the page cache, bytes alone"
LARGE = "shards straight from large pages, digests and checks"
BARE_LARGE = "shards straight from large pages, bytes alone"
NULL = "null sink, digests and checks"
BARE_NULL = "null sink, bytes alone"
SPECFORGE = "SpecForge: torch.save a sample"
SPECULATORS = "speculators: safetensors, moved"
ZARR = "zarr-python, sharded"
TENSORSTORE = "tensorstore, sharded"


def rows(material: Material, large: Material | None, shared: Path, disk: Path, rounds: int) -> list[Row]:
    """`large` is the same in dumps on a tmpfs that has large pages, if one can be mounted."""
    target = disk / "written"
    ways.of(disk)
    # The way that copies nothing, if this disk has it at all.
    direct = (past_the_page_cache(disk) or [WriteWay()])[0]
    todo: dict[str, Callable[[], None]] = {
        CP: partial(peers.copy, material, target),
        OURS: lambda: asyncio.run(_extract(material, target)),
        BARE: lambda: _bare(material, target),
        PAST: lambda: asyncio.run(_extract(material, target, lambda _: direct)),
        BARE_PAST: lambda: _bare(material, target, lambda _: direct),
        NULL: lambda: _null(material, target),
        BARE_NULL: lambda: _bare_null(material, target),
        SPECULATORS: partial(peers.speculators, material, target, shared),
        SPECFORGE: partial(peers.specforge, material, target),
        ZARR: partial(peers.zarr_python, material, target),
        TENSORSTORE: partial(peers.tensorstore_sharded, material, target),
    }
    if large is not None:
        todo[LARGE] = lambda: asyncio.run(_extract(large, target, lambda _: direct))
        todo[BARE_LARGE] = lambda: _bare(large, target, lambda _: direct)
    measured = measure({name: Way(run, after=partial(_clear, target)) for name, run in todo.items()}, rounds)
    speeds = {name: material.nbytes / one.median / 1e6 for name, one in measured.items()}
    cpu = {name: one.median_cpu / (material.nbytes / 1e9) for name, one in measured.items()}

    def against(name: str, at_least: float | None) -> Row:
        details = {f"{OURS}, MB/s": speeds[OURS], f"{name}, MB/s": speeds[name], f"{name}, CPU-s/GB": cpu[name]}
        return Row(f"dumps to durable shards, against {name}", times_faster(measured, OURS, name), "x", at_least, details=details)

    def straight(how: str, checked: str, bare: str) -> list[Row]:
        return [
            Row(
                f"the same {how}, CPU, {what}",
                cpu[name],
                "CPU-s/GB",
                details={f"{name}, against cp, x": times_faster(measured, name, CP), f"{name}, MB/s": speeds[name]},
            )
            for name, what in ((checked, "with digests, checksums and value checks"), (bare, "bytes alone"))
        ]

    return [
        against(CP, 1.0),
        Row("the same, CPU, with digests, checksums and value checks", cpu[OURS], "CPU-s/GB", at_most=0.40),
        Row(
            "the same, CPU, bytes alone",
            cpu[BARE],
            "CPU-s/GB",
            at_most=0.15,
            details={f"{BARE}, against cp, x": times_faster(measured, BARE, CP)},
        ),
        # Whichever way is the fastest one here, and was taken above.
        *straight("straight past the page cache", PAST, BARE_PAST),
        *(straight("straight from large pages", LARGE, BARE_LARGE) if large else ()),
        Row("into a null sink, with digests, checksums and value checks", _per_core(measured[NULL], material), "GB/s a core"),
        Row("into a null sink, bytes alone", _per_core(measured[BARE_NULL], material), "GB/s a core"),
        against(SPECFORGE, 5.0),
        against(SPECULATORS, 1.4),
        against(ZARR, 2.5),
        against(TENSORSTORE, None),
    ]


def _per_core(measured: Measured, material: Material) -> float:
    return material.nbytes / measured.median_cpu / 1e9


def _clear(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)


async def _extract(material: Material, target: Path, way: Callable[[Path], WriteWay] = ways.of) -> None:
    """As the service does it: captures are inspected as they come, units written when theirs are, side by side."""
    inspector, writer = ThreadedCaptureInspector(), LocalShardWriter(way=way)

    async def one(dumps: list[MappedDump], unit: UnitWrite) -> None:
        await _inspect(inspector, dumps, unit.arrays)
        await writer.write(unit)

    await asyncio.gather(*(one(dumps, unit) for dumps, unit in material.units(target)))
    inspector.close()
    writer.close()


async def _inspect(inspector: ThreadedCaptureInspector, dumps: list[MappedDump], arrays: tuple[HiddenArray, ...]) -> None:
    parts = []
    for dump in dumps:
        checksums = dump.tensors.get(ROW_CHECKSUMS)
        views = {array.name: dump.tensors[array.name].data for array in arrays}
        parts.append(CapturePart(views, None if checksums is None else checksums.data))
    reports = await asyncio.gather(*(inspector.inspect([part], arrays) for part in parts))
    assert not [report.refusal for report in reports if report.refusal]


def _bare(material: Material, target: Path, way: Callable[[Path], WriteWay] = ways.of) -> None:
    """Shards of what nobody looked at, on one thread."""

    def create(plan: ShardPlan) -> ObjectFile:
        path = target / plan.key
        path.parent.mkdir(parents=True)
        return object_files.create(path, plan.nbytes, way(path.parent))

    _write_all(material, target, create)


def _null(material: Material, target: Path) -> None:
    inspector = ThreadedCaptureInspector()

    async def inspect_all() -> None:
        for dumps, unit in material.units(target):
            await _inspect(inspector, dumps, unit.arrays)

    asyncio.run(inspect_all())
    inspector.close()
    _bare_null(material, target)


def _bare_null(material: Material, target: Path) -> None:
    _write_all(material, target, lambda _: NullFile())


def _write_all(material: Material, target: Path, create: Callable[[ShardPlan], ObjectFile]) -> None:
    for _, unit in material.units(target):
        mappings = SharedMappings(segment.data.cast("B") for segment in unit.segments)
        for plan in plan_shards(unit):
            file = create(plan)
            write_object(plan, file, mappings)
            file.close()
