"""The publisher writes over what was handed back: the same bytes as into a new file, within the budget, and nobody's else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from statetap_sglang import free_files
from statetap_sglang.beacon import Beacon
from statetap_sglang.filesystem import write_all
from statetap_sglang.free_files import hand_back
from statetap_sglang.publisher import DumpPublisher, PublishError
from statetap_sglang.reader import open_dump
from statetap_sglang.tap import FREE_DIRECTORY, remove_dead_tap

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors
from tests.fakes.mounts import fill, small_tmpfs

ROWS = 37
BEACON = make_beacon(recycle_from_bytes=1)


@pytest.fixture
def publisher(root: Path) -> Iterator[DumpPublisher]:
    publisher = DumpPublisher(root, "worker", BEACON)
    yield publisher
    publisher.close()


def publish(publisher: DumpPublisher, rows: int = ROWS, seed: int = 0) -> Path:
    return publisher.directory / publisher.publish(make_metadata("rid", rows), make_tensors(BEACON, rows, seed))


def free(publisher: DumpPublisher) -> list[str]:
    folder = publisher.directory / FREE_DIRECTORY
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def held_bytes(tap: Path) -> int:
    """What dumps, free files and whatever is half written hold."""
    return sum(path.stat().st_blocks * 512 for path in tap.rglob("*") if path.is_file() and path.name != ".next")


def size_of(root: Path, rows: int = ROWS) -> int:
    probe = DumpPublisher(root, "probe", BEACON)
    nbytes = held_bytes(publish(probe, rows).parent)
    probe.close()
    return nbytes


@pytest.mark.parametrize("rows", [ROWS, 20, 70])
def test_what_is_written_over_a_file_is_what_a_new_one_would_hold(root: Path, publisher: DumpPublisher, rows: int) -> None:
    anew = DumpPublisher(root, "anew", BEACON)
    path = publish(publisher, seed=1)
    inode = path.stat().st_ino
    hand_back(path, 1)
    publish(anew)
    again = publish(publisher, rows, seed=2)
    assert again.stat().st_ino == inode
    assert again.read_bytes() == publish(anew, rows, seed=2).read_bytes()
    assert again.stat().st_nlink == 1
    assert free(publisher) == []
    anew.close()


def test_at_steady_state_no_file_is_made(publisher: DumpPublisher) -> None:
    inodes = set()
    for turn in range(20):
        paths = [publish(publisher, seed=turn) for _ in range(3)]
        inodes |= {path.stat().st_ino for path in paths}
        for path in paths:
            with open_dump(path) as dump:
                assert bytes(dump.tensors["token_ids"].data) == bytes(make_tensors(BEACON, ROWS, turn)["token_ids"].data)
            hand_back(path, 1)
    assert len(inodes) == 3


def test_whoever_still_maps_a_released_dump_sees_what_was_in_it(publisher: DumpPublisher) -> None:
    """Its views outlive the release: of an inspector that is not done, or of a reader who broke the rule."""
    path = publish(publisher, seed=1)
    dump = open_dump(path)
    before = {name: bytes(tensor.data) for name, tensor in dump.tensors.items()}
    hand_back(path, 1)
    for rows in (ROWS, 5):
        publish(publisher, rows, seed=2)
    assert {name: bytes(tensor.data) for name, tensor in dump.tensors.items()} == before
    assert free(publisher) != [], "nobody took it"
    inode = (publisher.directory / FREE_DIRECTORY / free(publisher)[0]).stat().st_ino
    dump.close()
    del dump
    assert publish(publisher, seed=3).stat().st_ino == inode


def test_free_files_go_before_a_capture_is_refused(root: Path) -> None:
    size = size_of(root)
    publisher = DumpPublisher(root, "worker", make_beacon(recycle_from_bytes=1, budget_bytes=3 * size))
    for path in [publish(publisher) for _ in range(3)]:
        hand_back(path, 1)
    assert len(free(publisher)) == 3
    publish(publisher, 3 * ROWS)  # more than two of them, less than three
    assert held_bytes(publisher.directory) <= 3 * size
    with pytest.raises(PublishError, match="over the tap's budget"):
        publish(publisher)
    assert held_bytes(publisher.directory) <= 3 * size
    publisher.close()


def test_room_is_neither_lost_nor_given_twice(root: Path) -> None:
    """A budget of three dumps holds three, however often they were handed back, taken and published again."""
    size = size_of(root)
    publisher = DumpPublisher(root, "worker", make_beacon(recycle_from_bytes=1, budget_bytes=3 * size))
    for _ in range(5):
        paths = [publish(publisher) for _ in range(3)]
        with pytest.raises(PublishError, match="over the tap's budget"):
            publish(publisher)
        assert held_bytes(publisher.directory) <= 3 * size
        hand_back(paths[0], 1)
        paths[1].unlink()
        hand_back(paths[2], 1)
    publisher.close()


def test_what_a_failed_capture_took_is_room_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of(root)
    publisher = DumpPublisher(root, "worker", make_beacon(recycle_from_bytes=1, budget_bytes=2 * size))
    hand_back(publish(publisher), 1)

    def fail(descriptor: int, pieces: list[bytes | memoryview]) -> None:
        write_all(descriptor, pieces[:1])
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr("statetap_sglang.publisher.write_all", fail)
        with pytest.raises(PublishError, match="Input/output error"):
            publish(publisher)
    assert held_bytes(publisher.directory) == 0
    for _ in range(2):
        publish(publisher)
    publisher.close()


def test_a_full_tmpfs_takes_the_free_files_first(shm: Path) -> None:
    with small_tmpfs(shm / "small", 1 << 20) as small:
        publisher = DumpPublisher(small, "worker", BEACON)
        larger = publish(publisher, 4 * ROWS)
        hand_back(larger, 1)
        ballast = fill(small, leave=4096)
        publish(publisher, ROWS)  # no free file is of its size, and it does not fit beside the one that is there
        assert free(publisher) == []
        publisher.publish_error("rid", "why")
        assert len(list(publisher.directory.glob("*.error.json"))) == 1
        ballast.unlink()
        publisher.close()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("somebody's")


def _replace_by_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent.parent)


@pytest.mark.parametrize("disturb", [_remove, _replace_by_file, _replace_by_link])
def test_the_folder_may_be_disturbed_at_any_time(publisher: DumpPublisher, disturb: Callable[[Path], None]) -> None:
    paths = [publish(publisher) for _ in range(3)]
    hand_back(paths[0], 1)
    disturb(publisher.directory / FREE_DIRECTORY)
    with open_dump(publish(publisher, seed=1)):
        hand_back(paths[1], 1)
    assert not paths[1].exists()
    with open_dump(publish(publisher, seed=2)) as dump:
        assert dump.metadata.rid == "rid"


def test_the_folder_is_removed_while_a_free_file_is_written_over(
    publisher: DumpPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_back(publish(publisher), 1)

    def disturbed(descriptor: int, pieces: list[bytes | memoryview]) -> None:
        write_all(descriptor, pieces)
        shutil.rmtree(publisher.directory / FREE_DIRECTORY)

    with monkeypatch.context() as failing:
        failing.setattr("statetap_sglang.publisher.write_all", disturbed)
        with pytest.raises(PublishError, match="No such file"):
            publish(publisher)
    publish(publisher)


def test_a_killed_publishers_free_files_go_with_its_tap(root: Path, publisher: DumpPublisher) -> None:
    for path in [publish(publisher) for _ in range(2)]:
        hand_back(path, 1)
    kept = publish(publisher)
    taken = publisher._free.take(kept.stat().st_size)  # as far as it had come
    assert taken is not None
    os.close(taken.descriptor)
    assert publisher._lock is not None
    os.close(publisher._lock)  # the kernel does this for a process that is killed
    publisher._lock = None
    assert not remove_dead_tap(publisher.directory)
    assert held_bytes(publisher.directory) == kept.stat().st_blocks * 512
    again = DumpPublisher(root, "worker", BEACON)
    assert not (again.directory / FREE_DIRECTORY).exists()
    again.close()
    kept.unlink()
    assert remove_dead_tap(publisher.directory)


def test_a_publisher_that_ends_leaves_no_free_files(publisher: DumpPublisher) -> None:
    hand_back(publish(publisher), 1)
    kept = publish(publisher, 3 * ROWS)
    publisher.close()
    assert sorted(path.name for path in publisher.directory.iterdir()) == [".next", kept.name]


def test_without_leases_the_beacon_asks_for_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_leases(_: int) -> bool:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("statetap_sglang.publisher.is_read_by_nobody", no_leases)
    publisher = DumpPublisher(root, "worker", BEACON)
    publisher.announce()
    assert Beacon.read(publisher.directory) == make_beacon(recycle_from_bytes=None)
    publisher.close()


def test_many_files_that_are_still_read_do_not_hold_a_capture_up(
    publisher: DumpPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    monkeypatch.setattr(free_files, "is_read_by_nobody", looked_at.append)
    for path in [publish(publisher) for _ in range(30)]:
        hand_back(path, 1)
    publish(publisher)
    assert len(looked_at) == 8
    assert len(free(publisher)) == 30
