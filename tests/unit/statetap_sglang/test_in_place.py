"""Dumps that arrive in their own file: the same as through the ring, never visible too soon, never in pages that are read."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from statetap_sglang import header
from statetap_sglang.filesystem import write_all
from statetap_sglang.format import MAX_COUNTER, MAX_ROWS, DumpMetadata
from statetap_sglang.free_files import hand_back, remove_idle
from statetap_sglang.in_place import InPlacePublisher
from statetap_sglang.layout import CaptureLayout, Place
from statetap_sglang.pinned_files import IDLE_SECONDS, Landing, PinnedFiles, RegistrationRefused
from statetap_sglang.publisher import PublishError
from statetap_sglang.reader import open_dump
from statetap_sglang.snapshot import SampleSnapshot, SnapshotRing, host_views
from statetap_sglang.tap import FREE_DIRECTORY, remove_dead_tap

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors
from tests.fakes.mounts import fill, small_tmpfs
from tests.fakes.registration import FakeRegistration, is_mapped

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


@pytest.fixture
def tap(shm: Path) -> Any:
    tap = Tap(shm)
    yield tap
    tap.publisher.close()
    assert tap.cuda.pages == {}


def tensors_of(path: Path) -> dict[str, bytes]:
    with open_dump(path) as dump:
        dump.verify_rows()
        return {name: bytes(view.data) for name, view in dump.tensors.items()}


@pytest.mark.parametrize("rows", [ROWS, 36, 20])  # with 20 a page of the file is left over
def test_a_dump_that_landed_is_the_dump_that_would_be_written(tap: Tap, rows: int) -> None:
    tap.warm()
    written = tap.publisher.directory / tap.publisher.publish(make_metadata("rid", rows), make_tensors(BEACON, rows, 3))
    landed = tap.run_in_place(rows, 3)
    found = tensors_of(landed)
    assert len(found.pop("row_checksums")) == 8 * rows
    assert found == tensors_of(written)
    with open_dump(landed) as one, open_dump(written) as other:
        assert one.metadata == other.metadata
    assert landed.stat().st_size == FILE_BYTES
    with safe_open(landed, "pt") as file:
        assert set(found) < set(file.keys())
        assert file.get_tensor("token_ids").numpy().tobytes() == found["token_ids"]


def test_at_steady_state_nothing_is_made_registered_or_copied(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    tap.warm(3)
    written: list[int] = []

    def note(descriptor: int, pieces: list[bytes | memoryview]) -> None:
        written.append(sum(map(len, pieces)))
        write_all(descriptor, pieces)

    monkeypatch.setattr("statetap_sglang.publisher.write_all", note)
    inodes = set()
    for turn in range(20):
        paths = [tap.run_in_place(seed=turn) for _ in range(3)]
        inodes |= {path.stat().st_ino for path in paths}
        for path in paths:
            assert tensors_of(path)["token_ids"] == bytes(make_tensors(BEACON, ROWS, turn)["token_ids"].data)
            hand_back(path, 1)
        tap.publisher.tend()
    assert len(inodes) == 3
    assert tap.cuda.registered == 3
    assert set(written) == {PAGE}
    assert len(written) == 60


def test_nothing_is_visible_before_it_is_published(tap: Tap) -> None:
    tap.warm()
    snapshot = tap.snapshot()
    assert list(tap.path.glob("req_*")) == []
    assert all(name.startswith(".") for name in tap.free()), "nobody looks for it, and the service removes none of it"
    assert remove_idle(tap.path, set(tap.free())) == frozenset()
    tap.ring.release(snapshot.span)
    assert list(tap.path.glob("req_*")) == []
    tap.run_in_place()
    assert len(list(tap.path.glob("req_*"))) == 1


def test_a_file_is_lent_to_one_capture(tap: Tap) -> None:
    tap.warm(2)
    spans = [tap.snapshot(seed=seed).span for seed in range(3)]
    files = [span.file for span in spans if isinstance(span, Landing)]
    assert len({file.path for file in files}) == 2
    assert not isinstance(spans[2], Landing), "and the third goes through the ring"
    for span in spans:
        tap.ring.release(span)
        tap.ring.release(span) if isinstance(span, Landing) else None  # twice does not make it two
    assert len({id(tap.files.borrow(LAYOUT.file_bytes(ROWS))) for _ in range(3)} - {id(None)}) == 2
    for file in files:
        tap.files.release(file)


def test_whoever_still_maps_a_released_dump_sees_what_was_in_it(tap: Tap) -> None:
    tap.warm()
    path = tap.run_in_place(seed=1)
    dump = open_dump(path)
    before = {name: bytes(view.data) for name, view in dump.tensors.items()}
    hand_back(path, 1)
    for _ in range(3):
        tap.publisher.tend()
        tap.run(seed=2)
    assert {name: bytes(view.data) for name, view in dump.tensors.items()} == before
    dump.close()
    del dump
    tap.publisher.tend()
    assert tap.cuda.registered == len(tap.cuda.pages), "it was kept"
    tap.run_in_place(seed=3)


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_a_file_that_another_process_maps_is_not_lent(tap: Tap) -> None:
    tap.warm()
    path = tap.run_in_place()
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        reader.stdout.readline()
        hand_back(path, 1)
        tap.publisher.tend()
        assert tap.files.borrow(LAYOUT.file_bytes(ROWS)) is None
        reader.stdin.close()
        reader.wait()
    tap.publisher.tend()
    tap.run_in_place()


def test_pinned_files_count_wherever_they_are(shm: Path) -> None:
    """A budget of three files holds three, whether they are published, handed back or ready."""
    tap = Tap(shm, budget_bytes=4 * FILE_BYTES)
    tap.warm(3)
    for _ in range(5):
        paths = [tap.run_in_place() for _ in range(3)]
        kept = tap.publisher.publish(make_metadata("rid", ROWS), make_tensors(BEACON, ROWS))
        with pytest.raises(PublishError, match="over the tap's budget"):
            tap.publisher.publish(make_metadata("rid", ROWS), make_tensors(BEACON, ROWS))
        assert tap.held_bytes() <= 4 * FILE_BYTES
        (tap.path / kept).unlink()
        for path in paths:
            hand_back(path, 1)
        tap.publisher.tend()
    assert tap.cuda.registered == 3
    tap.publisher.close()


def test_ready_files_go_before_a_capture_is_refused(shm: Path) -> None:
    tap = Tap(shm, budget_bytes=3 * FILE_BYTES)
    tap.warm(2)
    rows = 4 * ROWS  # there is room for it once both are gone
    with open_dump(tap.path / tap.publisher.publish(make_metadata("rid", rows), make_tensors(BEACON, rows))) as dump:
        assert dump.metadata.extend_len == rows
    assert tap.cuda.pages == {}
    assert tap.free() == []
    assert tap.held_bytes() <= 3 * FILE_BYTES
    tap.publisher.close()


def test_free_files_make_room_for_one_that_lands(shm: Path) -> None:
    tap = Tap(shm, budget_bytes=2 * FILE_BYTES)
    for path in [tap.publisher.publish(make_metadata("rid", ROWS), make_tensors(BEACON, ROWS)) for _ in range(2)]:
        hand_back(tap.path / path, 1)
    tap.warm()
    assert tap.cuda.registered == 1
    assert tap.held_bytes() <= 2 * FILE_BYTES
    tap.publisher.close()


def test_no_more_is_registered_than_the_limit(shm: Path) -> None:
    tap = Tap(shm, limit_bytes=2 * FILE_BYTES + PAGE)
    for _ in range(4):
        tap.run()
    assert (tap.cuda.registered, tap.files.nbytes) == (2, 2 * FILE_BYTES)
    tap.publisher.close()


def test_a_full_tmpfs_takes_ready_files_first_and_makes_none(shm: Path) -> None:
    with small_tmpfs(shm / "small", 1 << 20) as small:
        tap = Tap(small)
        tap.warm(2)
        fill(small, leave=PAGE)
        tap.publisher.publish(make_metadata("rid", ROWS), make_tensors(BEACON, ROWS))
        assert len(tap.cuda.pages) == 1
        tap.ring.release(tap.snapshot(2 * ROWS).span)  # is wanted, and there is no room for it
        tap.publisher.tend()
        assert (tap.cuda.registered, len(tap.free())) == (2, 1)
        tap.publisher.close()


@pytest.mark.parametrize(
    "refusal", [RegistrationRefused("operation not supported (801)"), RuntimeError("no cudart"), OSError(12, "mmap")]
)
def test_where_pages_cannot_be_registered_the_ring_is_used_and_it_is_said_once(
    tap: Tap, refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tap.cuda.refuses = refusal
    with caplog.at_level(logging.WARNING, "statetap"):
        paths = [tap.run(seed=turn) for turn in range(5)]
    assert [tensors_of(path)["token_ids"] for path in paths] == [
        bytes(make_tensors(BEACON, ROWS, turn)["token_ids"].data) for turn in range(5)
    ]
    assert tap.cuda.asked == 1
    assert [str(refusal) in record.message for record in caplog.records] == [True]
    assert "states go through the pinned ring" in caplog.text
    assert (tap.free(), tap.files.nbytes) == ([], 0)


def test_a_limit_that_comes_later_leaves_what_is_registered_in_use(tap: Tap) -> None:
    tap.warm()
    tap.cuda.refuses = RegistrationRefused("out of memory (2)")
    first, second = tap.snapshot(), tap.snapshot()
    assert not isinstance(second.span, Landing)
    for snapshot in (second, first):
        hand_back(tap.publish(snapshot), 1)
    tap.publisher.tend()
    tap.run_in_place()


def test_pages_that_cannot_be_unregistered_stay_mapped(tap: Tap, caplog: pytest.LogCaptureFixture) -> None:
    tap.warm()
    ((address, nbytes),) = tap.cuda.pages.items()
    tap.cuda.keeps = "unspecified launch failure (719)"
    assert tap.files.remove(1) == FILE_BYTES
    assert tap.free() == []
    assert is_mapped(address, nbytes)
    assert tap.files.nbytes == nbytes
    assert "could not be unregistered" in caplog.text
    tap.run()
    assert tap.cuda.registered == 1
    tap.cuda.pages.clear()


def _cut(path: Path) -> None:
    os.truncate(path, PAGE)


def _cut_and_grow(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, PAGE)
    os.truncate(path, size)


def _link(path: Path) -> None:
    path.with_name("elsewhere").hardlink_to(path)


def _replace(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("disturb", [_cut, _cut_and_grow, _link, _replace])
def test_a_file_that_is_not_as_it_was_left_is_not_used_again(tap: Tap, disturb: Callable[[Path], None]) -> None:
    """Its pages may not be those that are registered: what a device copied there would not be in the file."""
    tap.warm()
    path = tap.run_in_place()
    disturb(path)
    hand_back(path, 0)
    tap.publisher.tend()
    assert tap.cuda.pages == {}
    assert tap.files.borrow(LAYOUT.file_bytes(ROWS)) is None
    assert [name for name in tap.free() if name.startswith(".")] == []
    with open_dump(tap.run()):
        pass


def test_what_the_service_removes_is_given_back(tap: Tap) -> None:
    tap.warm(2)
    first, second = tap.run_in_place(), tap.run_in_place()
    first.unlink()
    hand_back(second, 1)
    assert remove_idle(tap.path, set(tap.free())) == frozenset()
    tap.publisher.tend()
    assert (tap.cuda.pages, tap.files.nbytes) == ({}, 0)


def test_what_is_idle_is_given_back(shm: Path) -> None:
    tap = Tap(shm)
    now = [100.0]
    tap.files._clock = lambda: now[0]
    tap.warm(2)
    now[0] += IDLE_SECONDS - 1
    tap.ring.release(tap.snapshot().span)
    now[0] += 1
    tap.publisher.tend()
    assert len(tap.cuda.pages) == len(tap.free()) == 1
    now[0] += IDLE_SECONDS
    tap.publisher.tend()
    assert (tap.cuda.pages, tap.free()) == ({}, [])
    tap.publisher.close()


def test_the_mapping_goes_with_the_file(tap: Tap) -> None:
    tap.warm()
    ((address, nbytes),) = tap.cuda.pages.items()
    tap.files.remove(1)
    assert not is_mapped(address, nbytes)


def test_a_failed_publication_leaves_the_file_to_the_next(tap: Tap) -> None:
    tap.warm()
    snapshot = tap.snapshot()
    (tap.path / f"req_{tap.publisher._next}.safetensors").mkdir()  # somebody's
    with pytest.raises(PublishError, match="File exists"):
        tap.publish(snapshot)
    tap.run_in_place()
    assert tap.cuda.registered == 1


def test_a_directory_that_is_removed_costs_captures_and_no_more(tap: Tap) -> None:
    tap.warm(2)
    tap.run_in_place()
    shutil.rmtree(tap.path)
    with pytest.raises(PublishError, match="No such file"):
        tap.run_in_place()
    assert tap.cuda.pages == {}
    tap.warm()
    tensors_of(tap.run_in_place())


def test_a_killed_publisher_leaves_nothing_but_what_it_published(shm: Path) -> None:
    tap = Tap(shm)
    tap.warm(3)
    published = tap.run_in_place(seed=1)
    lent = tap.snapshot()
    assert isinstance(lent.span, Landing)
    assert tap.publisher._lock is not None
    os.close(tap.publisher._lock)  # the kernel does this for a process that is killed, and takes the mappings
    tap.publisher._lock = None
    assert not remove_dead_tap(tap.path)
    assert tap.held_bytes() == published.stat().st_blocks * 512
    assert tensors_of(published)["token_ids"] == bytes(make_tensors(BEACON, ROWS, 1)["token_ids"].data)
    published.unlink()
    assert remove_dead_tap(tap.path)


def test_a_publisher_that_ends_leaves_its_dumps(tap: Tap) -> None:
    tap.warm(3)
    published, handed_back = tap.run_in_place(), tap.run_in_place()
    hand_back(handed_back, 1)
    lent = tap.snapshot()
    tap.publisher.close()
    with pytest.raises(PublishError, match="the publisher is closed"):
        tap.publish(lent)
    tap.files.remove(1)
    assert tap.cuda.pages == {}
    assert sorted(path.name for path in tap.path.iterdir()) == [".next", published.name]
    tensors_of(published)


def test_without_leases_there_are_no_pinned_files(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_leases(_: int) -> bool:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("statetap_sglang.publisher.is_read_by_nobody", no_leases)
    publisher = InPlacePublisher(shm, "worker", BEACON, registration=FakeRegistration(), limit_bytes=1 << 30)
    assert publisher.pinned is None
    publisher.tend()
    publisher.publish(make_metadata("rid", ROWS), make_tensors(BEACON, ROWS))
    publisher.close()


def test_small_dumps_are_not_handed_back_and_do_not_land(shm: Path) -> None:
    beacon = make_beacon(recycle_from_bytes=FILE_BYTES)
    publisher = InPlacePublisher(shm, "worker", beacon, registration=FakeRegistration(), limit_bytes=1 << 30)
    assert publisher.pinned is not None
    assert publisher.pinned.borrow(FILE_BYTES - 1) is None
    assert publisher.pinned.next_wanted() is None
    assert publisher.pinned.borrow(FILE_BYTES) is None
    assert publisher.pinned.next_wanted() == FILE_BYTES
    publisher.close()


def test_places_in_a_file_are_pages_behind_the_header() -> None:
    places = list(LAYOUT.file_places(ROWS).values())
    assert places[0].offset == PAGE
    assert all(place.offset % PAGE == 0 for place in places)
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(places))
    assert LAYOUT.file_bytes(ROWS) - PAGE < places[-1].offset + places[-1].nbytes <= LAYOUT.file_bytes(ROWS)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=600))
def test_a_header_that_is_said_to_fit_fits(rid: str) -> None:
    """With the longest numbers and names that there may be, in all other places."""
    counters = dict.fromkeys(("retraction_count", "forward_pass", "forward_start_ns", "forward_end_ns"), MAX_COUNTER - 1)
    lengths = dict.fromkeys(("prefix_len", "extend_len", "prompt_len"), MAX_ROWS - 1)
    metadata = DumpMetadata(boot_id="b" * 200, rid=rid, **counters, **lengths)
    layout = CaptureLayout(aux_layers=999, final="both", hidden_size=65535, dtype="bfloat16")
    places: dict[str, Place] = layout.file_places(MAX_ROWS - 1)
    file_bytes = layout.file_bytes(MAX_ROWS - 1) + PAGE
    if header.fits_one_page(metadata):
        assert len(header.encode_head(places, metadata.to_map(), file_bytes)) == PAGE
    else:
        assert len(rid) > 40


def test_a_header_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ValueError, match="is the request id that long"):
        header.encode_head(LAYOUT.file_places(1), make_metadata("r" * PAGE, 1).to_map(), LAYOUT.file_bytes(1))
