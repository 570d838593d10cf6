"""From tensors to published dumps: into files that were handed back, against files that are made anew."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from statetap_sglang.free_files import RECYCLE_FROM_BYTES, hand_back
from statetap_sglang.publisher import DumpPublisher

from tests.bench.interleaved import Measured, Way, measure
from tests.bench.rows import Row
from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

LAYERS = 3
FRESH, RECYCLED = "publishing into fresh files", "publishing into recycled files"
UNLINKING, HANDING_BACK = "removing what was released", "handing back what was released"


def rows(root: Path, samples: int, rows: int, hidden: int, rounds: int) -> list[Row]:
    """`samples` dumps of `rows` rows are published and released in turn; what the service does in between is left out."""
    taps = {boot: _Tap(root, boot, rows, hidden) for boot in ("fresh", "recycled")}
    fresh, recycled = taps["fresh"], taps["recycled"]
    todo: dict[str, Callable[[], None]] = {
        FRESH: partial(fresh.publish, samples),
        UNLINKING: partial(fresh.release, Path.unlink),
        RECYCLED: partial(recycled.publish, samples),
        HANDING_BACK: partial(recycled.release, _hand_back),
    }
    recycled.publish(samples)
    recycled.release(_hand_back)
    made = recycled.inodes()
    measured = measure({name: Way(run) for name, run in todo.items()}, rounds)
    assert recycled.inodes() == made, "at steady state no file is made"
    for tap in taps.values():
        tap.publisher.close()
    nbytes = samples * fresh.nbytes

    def per_core(names: Sequence[str]) -> float:
        return nbytes / statistics.median(_cpu(measured, names)) / 1e9

    def faster(ours: Sequence[str], theirs: Sequence[str]) -> float:
        pairs = zip(_cpu(measured, ours), _cpu(measured, theirs), strict=True)
        return statistics.median(slower / quicker for quicker, slower in pairs)

    def row(name: str, ours: Sequence[str], theirs: Sequence[str], at_least: float | None) -> Row:
        details = {"recycled, GB/s a core": per_core(ours), "fresh, GB/s a core": per_core(theirs)}
        return Row(name, faster(ours, theirs), "x", at_least, details=details)

    return [
        row("publisher, GB/s a core, recycled against fresh files", [RECYCLED], [FRESH], 2.0),
        row("the same with what the service does to release them", [RECYCLED, HANDING_BACK], [FRESH, UNLINKING], None),
    ]


def _cpu(measured: dict[str, Measured], names: Sequence[str]) -> list[float]:
    """CPU seconds of some ways together, round by round."""
    return [sum(seconds) for seconds in zip(*(measured[name].cpu_seconds for name in names), strict=True)]


def _hand_back(path: Path) -> None:
    hand_back(path, RECYCLE_FROM_BYTES)


class _Tap:
    """A tap with one sample to publish over and over."""

    def __init__(self, root: Path, boot: str, rows: int, hidden: int) -> None:
        beacon = make_beacon(
            boot_id=boot,
            aux_layer_ids=tuple(range(LAYERS)),
            hidden_size=hidden,
            final="post_norm",
            budget_bytes=1 << 40,
            recycle_from_bytes=RECYCLE_FROM_BYTES,
        )
        self.publisher = DumpPublisher(root, "bench", beacon)
        self._boot, self._rows = boot, rows
        self._tensors = make_tensors(beacon, rows)
        self._published: list[Path] = []

    @property
    def nbytes(self) -> int:
        """Of one dump's tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def publish(self, samples: int) -> None:
        for number in range(samples):
            metadata = make_metadata(f"r{number}", self._rows, boot_id=self._boot)
            self._published.append(self.publisher.directory / self.publisher.publish(metadata, self._tensors))

    def release(self, remove: Callable[[Path], None]) -> None:
        for path in self._published:
            remove(path)
        self._published.clear()

    def inodes(self) -> set[int]:
        return {path.stat().st_ino for path in self.publisher.directory.rglob("*") if path.is_file()}
