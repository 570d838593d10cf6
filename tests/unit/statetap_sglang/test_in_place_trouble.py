"""Dumps that arrive in their own file when something is in the way: registration, the file system, a kill."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from statetap_sglang.free_files import hand_back, remove_idle
from statetap_sglang.in_place import InPlacePublisher
from statetap_sglang.pinned_files import IDLE_SECONDS, Landing, RegistrationRefused
from statetap_sglang.publisher import PublishError
from statetap_sglang.reader import open_dump
from statetap_sglang.tap import remove_dead_tap

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors
from tests.fakes.landing_tap import BEACON, FILE_BYTES, LAYOUT, PAGE, ROWS, Tap, tensors_of
from tests.fakes.registration import FakeRegistration, is_mapped


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
