"""A ring, a publisher and its files, to land dumps in on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from statetap_sglang.in_place import InPlacePublisher
from statetap_sglang.layout import CaptureLayout
from statetap_sglang.pinned_files import Landing, PinnedFiles
from statetap_sglang.reader import open_dump
from statetap_sglang.snapshot import SampleSnapshot, SnapshotRing, host_views
from statetap_sglang.tap import FREE_DIRECTORY

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors
from tests.fakes.registration import FakeRegistration

PAGE = 4096
ROWS = 37
BEACON = make_beacon(recycle_from_bytes=1)
LAYOUT = CaptureLayout(aux_layers=2, final="both", hidden_size=BEACON.hidden_size, dtype=BEACON.dtype)
FILE_BYTES = LAYOUT.file_bytes(ROWS)


class Tap:
    """A ring, a publisher and its files, on a CPU: what would be copied from a device is written where the copy would land."""

    def __init__(self, root: Path, *, limit_bytes: int = 1 << 30, budget_bytes: int = 1 << 30) -> None:
        self.cuda = FakeRegistration()
        beacon = make_beacon(recycle_from_bytes=1, budget_bytes=budget_bytes)
        self.publisher = InPlacePublisher(root, "worker", beacon, registration=self.cuda, limit_bytes=limit_bytes)
        self.ring = SnapshotRing(LAYOUT, 1 << 20, torch.device("cpu"))
        assert self.publisher.pinned is not None
        self.files: PinnedFiles = self.publisher.pinned
        self.ring.land_in(self.files)
        self.path = self.publisher.directory

    def snapshot(self, rows: int = ROWS, seed: int = 0) -> SampleSnapshot:
        snapshot = self.ring.reserve(rows, in_place=True)
        assert snapshot is not None
        for name, view in make_tensors(BEACON, rows, seed).items():
            snapshot.tensors[name].view(torch.uint8).view(-1).copy_(torch.frombuffer(bytearray(view.data), dtype=torch.uint8))
        snapshot.add_checksums()
        return snapshot

    def publish(self, snapshot: SampleSnapshot, rows: int = ROWS) -> Path:
        metadata, number = make_metadata("rid", rows), self.publisher.reserve()
        try:
            if isinstance(snapshot.span, Landing):
                name = self.publisher.publish_in_place(metadata, snapshot.span, number)
            else:
                name = self.publisher.publish(metadata, host_views(snapshot.host, LAYOUT.places(rows)), number)
        finally:
            self.ring.release(snapshot.span)
            self.publisher.tend()
            self.cuda.demand_mapped()
        return self.path / name

    def run(self, rows: int = ROWS, seed: int = 0) -> Path:
        return self.publish(self.snapshot(rows, seed), rows)

    def run_in_place(self, rows: int = ROWS, seed: int = 0) -> Path:
        snapshot = self.snapshot(rows, seed)
        assert isinstance(snapshot.span, Landing)
        return self.publish(snapshot, rows)

    def warm(self, files: int = 1, rows: int = ROWS) -> None:
        """Captures that find no file, so that so many are made; what they published is removed."""
        for _ in range(files):
            snapshots = [self.snapshot(rows) for _ in range(len(self.cuda.pages) + 1)]
            through_the_ring = snapshots.pop()
            assert not isinstance(through_the_ring.span, Landing)
            self.publish(through_the_ring, rows).unlink()
            for snapshot in snapshots:
                self.ring.release(snapshot.span)

    def free(self) -> list[str]:
        folder = self.path / FREE_DIRECTORY
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def held_bytes(self) -> int:
        return sum(p.stat().st_blocks * 512 for p in self.path.rglob("*") if p.is_file() and p.name != ".next")


def tensors_of(path: Path) -> dict[str, bytes]:
    with open_dump(path) as dump:
        dump.verify_rows()
        return {name: bytes(view.data) for name, view in dump.tensors.items()}
