"""Dumps that arrive in their own file: the same as through the ring, never visible too soon, never in pages that are read."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from statetap_sglang import header
from statetap_sglang.filesystem import write_all
from statetap_sglang.format import MAX_COUNTER, MAX_ROWS, DumpMetadata
from statetap_sglang.free_files import hand_back, remove_idle
from statetap_sglang.layout import CaptureLayout, Place
from statetap_sglang.pinned_files import Landing
from statetap_sglang.publisher import PublishError
from statetap_sglang.reader import open_dump

from tests.fakes.dumps import make_metadata, make_tensors
from tests.fakes.landing_tap import BEACON, FILE_BYTES, LAYOUT, PAGE, ROWS, Tap, tensors_of
from tests.fakes.mounts import fill, small_tmpfs


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
