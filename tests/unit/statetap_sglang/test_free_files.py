"""Free files one by one: how they are handed back, which of them is taken, and what is never written to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from statetap_sglang import free_files
from statetap_sglang.filesystem import map_readonly
from statetap_sglang.free_files import FreeFiles, hand_back, is_read_by_nobody, remove_idle
from statetap_sglang.tap import FREE_DIRECTORY

PAGE = 4096
# Maps a file, says so, and waits until its input is closed.
READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tap(root: Path) -> Path:
    root.mkdir()
    return root


def dump(tap: Path, number: int, nbytes: int = PAGE, fill: bytes = b"x") -> Path:
    path = tap / f"req_{number}.safetensors"
    path.write_bytes(fill * nbytes)
    return path


def give(tap: Path, number: int, nbytes: int = PAGE) -> Path:
    hand_back(dump(tap, number, nbytes), 1)
    return tap / FREE_DIRECTORY / f"{number}.{-(-nbytes // PAGE) * PAGE}"


def free(tap: Path) -> list[str]:
    return sorted(path.name for path in (tap / FREE_DIRECTORY).iterdir())


def take(files: FreeFiles, nbytes: int) -> str | None:
    """The name of the free file that was taken."""
    taken = files.take(nbytes)
    if taken is None:
        return None
    assert os.fstat(taken.descriptor).st_size <= nbytes
    os.close(taken.descriptor)
    return taken.path.name.removeprefix(".")


def test_a_file_is_handed_back_as_it_is(tap: Path) -> None:
    path = dump(tap, 7, PAGE + 1)
    inode = path.stat().st_ino
    hand_back(path, 1)
    assert not path.exists()
    (handed,) = (tap / FREE_DIRECTORY).iterdir()
    assert (handed.name, handed.stat().st_ino, handed.stat().st_size) == ("7.8192", inode, PAGE + 1)
    hand_back(path, 1)  # gone: nothing happens
    assert free(tap) == ["7.8192"]


def test_what_is_small_is_removed(tap: Path) -> None:
    hand_back(dump(tap, 1, PAGE - 1), PAGE)
    hand_back(dump(tap, 2, PAGE), PAGE)
    assert free(tap) == ["2.4096"]
    assert list(tap.glob("req_*")) == []


def _symbolic_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def _hard_link(path: Path, precious: Path) -> None:
    path.hardlink_to(precious)


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _somebody_elses(path: Path, _: Path) -> None:
    path.write_bytes(bytes(PAGE))
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("files can be given away by root alone")


SUSPICIOUS = pytest.mark.parametrize("make", [_symbolic_link, _hard_link, _fifo, _somebody_elses])


@SUSPICIOUS
def test_what_is_suspicious_is_removed_and_not_handed_back(tap: Path, make: Callable[[Path, Path], None]) -> None:
    precious = tap / "precious"
    precious.write_bytes(b"p" * PAGE)
    make(tap / "req_1.safetensors", precious)
    hand_back(tap / "req_1.safetensors", 0)
    assert sorted(path.name for path in tap.iterdir()) == ["precious"]
    assert precious.read_bytes() == b"p" * PAGE


@SUSPICIOUS
def test_what_is_suspicious_is_removed_and_not_taken(tap: Path, make: Callable[[Path, Path], None]) -> None:
    precious = tap / "precious"
    precious.write_bytes(b"p" * PAGE)
    sound = give(tap, 1, 2 * PAGE)
    make(tap / FREE_DIRECTORY / "2.12288", precious)
    assert take(FreeFiles(tap), 3 * PAGE) == sound.name
    assert free(tap) == [f".{sound.name}"]
    assert precious.read_bytes() == b"p" * PAGE


def test_the_oldest_make_room(tap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_files, "MAX_FREE_FILES", 3)
    for number in (8, 9, 10, 11):
        give(tap, number)
    assert free(tap) == ["10.4096", "11.4096", "9.4096"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_nothing_is_handed_back_to_what_is_no_directory(tap: Path, tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "link":
        (tap / FREE_DIRECTORY).symlink_to(elsewhere)
    else:
        (tap / FREE_DIRECTORY).write_text("somebody's")
    (elsewhere / "5.4096").write_bytes(bytes(PAGE))
    hand_back(dump(tap, 1), 1)
    assert [path.name for path in tap.iterdir()] == [FREE_DIRECTORY]
    assert [path.name for path in elsewhere.iterdir()] == ["5.4096"]
    assert (take(FreeFiles(tap), PAGE), FreeFiles(tap).nbytes, remove_idle(tap, {"5.4096"})) == (None, 0, frozenset())


def test_the_nearest_in_size_is_taken(tap: Path) -> None:
    for number, pages in enumerate((2, 4, 7, 20)):
        give(tap, number, pages * PAGE)
    files = FreeFiles(tap)
    assert files.nbytes == 33 * PAGE
    assert [take(files, pages * PAGE) for pages in (5, 5, 5, 5)] == ["1.16384", "2.28672", "0.8192", None]
    assert take(files, 11 * PAGE) == "3.81920"


def test_a_better_one_that_came_meanwhile_is_found(tap: Path) -> None:
    files = FreeFiles(tap)
    give(tap, 1, 3 * PAGE)
    assert files.nbytes == 3 * PAGE
    give(tap, 2, 4 * PAGE)
    assert take(files, 4 * PAGE) == "2.16384"


def test_a_longer_file_is_cut_before_it_is_written_to(tap: Path) -> None:
    give(tap, 1, 3 * PAGE)
    taken = FreeFiles(tap).take(2 * PAGE + 5)
    assert taken is not None
    assert (os.fstat(taken.descriptor).st_size, taken.held_bytes) == (2 * PAGE + 5, 3 * PAGE)
    os.close(taken.descriptor)


def test_what_somebody_removed_is_not_taken(tap: Path) -> None:
    files = FreeFiles(tap)
    gone, there = give(tap, 1), give(tap, 2)
    assert files.nbytes == 2 * PAGE
    gone.unlink()
    assert [take(files, PAGE), take(files, PAGE)] == [there.name, None]


def test_a_file_that_is_mapped_is_left_until_it_is_not(tap: Path) -> None:
    path = dump(tap, 1)
    descriptor = os.open(path, os.O_RDONLY)
    view = map_readonly(descriptor, PAGE)
    os.close(descriptor)
    hand_back(path, 1)
    files = FreeFiles(tap)
    assert take(files, PAGE) is None
    assert free(tap) == ["1.4096"]
    assert bytes(view) == b"x" * PAGE
    del view
    assert take(files, PAGE) == "1.4096"


def test_a_file_that_another_process_maps_is_left(tap: Path) -> None:
    path = dump(tap, 1)
    with subprocess.Popen([sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        reader.stdout.readline()
        hand_back(path, 1)
        files = FreeFiles(tap)
        assert take(files, PAGE) is None
        reader.stdin.close()
        reader.wait()
    assert take(files, PAGE) == "1.4096"


def test_a_file_that_is_open_for_writing_is_left(tap: Path) -> None:
    handed = give(tap, 1)
    with handed.open("r+b"):
        assert take(FreeFiles(tap), PAGE) is None
    assert take(FreeFiles(tap), PAGE) == handed.name


def test_without_leases_nothing_is_taken(tap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = give(tap, 1)

    def no_leases(_: int) -> bool:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(free_files, "is_read_by_nobody", no_leases)
    assert take(FreeFiles(tap), PAGE) is None
    assert not handed.exists()


def test_the_lease_is_given_back(tap: Path) -> None:
    path = dump(tap, 1)
    descriptor = os.open(path, os.O_WRONLY)
    assert is_read_by_nobody(descriptor)
    assert path.read_bytes() == b"x" * PAGE  # a lease that was kept would make this wait for a minute
    assert is_read_by_nobody(descriptor)
    os.close(descriptor)


def test_the_largest_are_removed_first_and_no_more_than_it_takes(tap: Path) -> None:
    for number, pages in enumerate((1, 5, 3, 2)):
        give(tap, number, pages * PAGE)
    files = FreeFiles(tap)
    assert files.remove(6 * PAGE) == 8 * PAGE
    assert free(tap) == ["0.4096", "3.8192"]
    assert files.remove(100 * PAGE) == 3 * PAGE
    assert files.remove(1) == 0


def test_what_is_seen_twice_is_idle(tap: Path) -> None:
    give(tap, 1)
    give(tap, 2)
    seen = remove_idle(tap, frozenset())
    assert take(FreeFiles(tap), PAGE) in seen
    give(tap, 3)
    assert remove_idle(tap, seen) == {"3.4096"}
    assert [name for name in free(tap) if not name.startswith(".")] == ["3.4096"]


def test_a_name_is_not_believed(tap: Path) -> None:
    handed = give(tap, 1, 2 * PAGE)
    handed.rename(handed.with_name("1.16384"))
    taken = FreeFiles(tap).take(4 * PAGE)
    assert taken is not None
    assert taken.held_bytes == 2 * PAGE
    os.close(taken.descriptor)
