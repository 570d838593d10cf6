"""Free dump files: what the service has released, and the publisher writes over, so that it need not ask for new pages.

Dumps of at least the beacon's `recycle_from_bytes` are renamed into `.free/` when they are released, as `<N>.<bytes>`; N was the
dump's number. The service removes what was not taken for a while, the publisher whatever it needs the room for; either may remove
any, at any time.

Invariants: a file is written over only while no process at all has it open or mapped, which the kernel says
(`is_read_by_nobody`); what is not an ordinary file of ours, under one name, is removed and never written to. Nothing is lost with
a free file. Names are strings here: this runs once or twice for every dump.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import threading
from collections import defaultdict
from collections.abc import Container
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from statetap_sglang.filesystem import rename_noreplace, round_to_pages
from statetap_sglang.format import dump_number
from statetap_sglang.tap import FREE_DIRECTORY, TapError, ensure_private_directory

MAX_FREE_FILES = 256
# Below this, making a file costs less than finding one (`make bench`).
RECYCLE_FROM_BYTES = 256 << 10
# A file that differs from what is wanted by this share of it is good enough not to look for a better one.
_NEAR = 1 / 8
# For one dump, so many files are looked at before a new one is made: somebody may still read them.
_MAX_TRIES = 8
_FREE_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True)
class TakenFile:
    """A free file that is the holder's now, under a name that nobody looks for, at most as long as was asked for.

    The descriptor is open for writing, and the holder's to close. `held_bytes` is what the file held while it was free.
    """

    path: Path
    descriptor: int
    held_bytes: int


def hand_back(dump: Path, least_bytes: int) -> None:
    """Release a dump of a tap that recycles those of `least_bytes` or more; the caller has unmapped it.

    Nothing happens if it is gone. Where there are `MAX_FREE_FILES`, the oldest make room. What is smaller, or cannot become a
    free file, is removed.

    Raises:
        OSError: it can be neither renamed nor removed.
    """
    try:
        status = dump.lstat()
        number = dump_number(dump.name)
        if number is None or not _is_ordinary(status) or status.st_size < least_bytes:
            dump.unlink()
            return
        try:
            free = _with_room_for_one(dump.parent / FREE_DIRECTORY)
            rename_noreplace(dump, free / f"{number}.{round_to_pages(status.st_size)}")
        except (TapError, OSError):
            dump.unlink()
    except FileNotFoundError:
        return


def remove_idle(tap: Path, seen: AbstractSet[str]) -> frozenset[str]:
    """Remove those free files that were `seen` an earlier time; returns the names of the others, to be `seen` the next time."""
    free = f"{tap}/{FREE_DIRECTORY}"
    there: frozenset[str] = frozenset()
    with suppress(OSError):
        there = frozenset(free_names(free))
    for name in there & seen:
        _remove(free, name)
    return there - seen


class FreeFiles:
    """The publisher's side: the free files of its tap, but for `others`, by number, which are looked after elsewhere.

    Every method may be called from any thread.
    """

    def __init__(self, tap: Path, others: Container[int] = ()) -> None:
        self._others = others
        self._mutex = threading.Lock()
        self._folder = f"{tap}/{FREE_DIRECTORY}"
        self._known: dict[int, list[str]] = {}
        """By what they hold. Some may be gone, and there may be others."""

    @property
    def nbytes(self) -> int:
        """What they hold together."""
        with self._mutex:
            self._look()
            return sum(size * len(names) for size, names in self._known.items())

    def take(self, length: int) -> TakenFile | None:
        """Take the one that is nearest in size to a file of `length` bytes. None: there is none, or only much larger ones.

        To cut one down to less than half is more work than to make a new one.
        """
        nbytes = round_to_pages(length)
        with self._mutex:
            size = self._nearest(nbytes)
            if size is None or abs(size - nbytes) > nbytes * _NEAR:
                self._look()
            for _ in range(_MAX_TRIES):
                size = self._nearest(nbytes)
                if size is None:
                    return None
                if (taken := self._take(self._pop(size), length)) is not None:
                    return taken
        return None

    def remove(self, nbytes: int) -> int:
        """Remove some until `nbytes` or more are gained, the largest first. Returns what was gained, 0 if there are none."""
        with self._mutex:
            self._look()
            gained = 0
            while self._known and gained < nbytes:
                size = max(self._known)
                gained += size * _remove(self._folder, self._pop(size))
            return gained

    def _look(self) -> None:
        self._known = defaultdict(list)
        with suppress(OSError):
            for name in free_names(self._folder):
                if free_number(name) in self._others:
                    continue
                self._known[int(name.partition(".")[2])].append(name)

    def _nearest(self, nbytes: int) -> int | None:
        if nbytes in self._known:
            return nbytes
        return min((size for size in self._known if size < 2 * nbytes), key=lambda size: abs(size - nbytes), default=None)

    def _pop(self, size: int) -> str:
        name = self._known[size].pop()
        if not self._known[size]:
            del self._known[size]
        return name

    def _take(self, name: str, length: int) -> TakenFile | None:
        """Take this file, if it is fit to be written over; if it is not, it is left or removed."""
        free, path = Path(f"{self._folder}/{name}"), Path(f"{self._folder}/.{name}")
        try:
            rename_noreplace(free, path)
        except OSError:
            return None  # somebody was quicker
        descriptor: int | None = None
        try:
            # O_NONBLOCK: opening a FIFO must not wait for its reader.
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(descriptor)
            if not _is_ordinary(status):
                raise OSError(f"{path} is not an ordinary file of ours")
            if is_read_by_nobody(descriptor):
                if status.st_size > length:
                    os.ftruncate(descriptor, length)
                return TakenFile(path, descriptor, round_to_pages(status.st_size))
            rename_noreplace(path, free)
        except OSError:
            with suppress(OSError):
                path.unlink()
        if descriptor is not None:
            os.close(descriptor)
        return None


def is_read_by_nobody(descriptor: int) -> bool:
    """Whether an open file, ours for writing, is open or mapped nowhere else, in any process.

    A write lease is granted only then (fcntl(2), F_SETLEASE; a mapping holds its file as a descriptor does). It is given back at
    once.

    Raises:
        OSError: the system grants no leases: they are switched off (fs.leases-enable), or the file system has none.
    """
    # Whoever opens the file in this instant waits, and the holder is told by a signal: by default one that would end us.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _with_room_for_one(free: Path) -> Path:
    """The directory of free files, made if it is missing, with less than `MAX_FREE_FILES` in it."""
    try:
        names = free_names(os.fspath(free))
    except FileNotFoundError:
        ensure_private_directory(free)
        return free
    if len(names) >= MAX_FREE_FILES:
        for name in sorted(names, key=free_number)[: len(names) + 1 - MAX_FREE_FILES]:
            _remove(os.fspath(free), name)
    return free


def free_names(free: str) -> list[str]:
    """The names of the free files in this directory.

    Raises:
        FileNotFoundError: there is no such directory.
        NotADirectoryError: something else is there; a symbolic link is not followed.
    """
    if not stat.S_ISDIR(os.lstat(free).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), free)
    return [name for name in os.listdir(free) if _FREE_NAME.fullmatch(name)]  # noqa: PTH208 (many, and only their names)


def free_number(name: str) -> int:
    """The number of the dump that a free file was."""
    return int(name.partition(".")[0])


def _remove(free: str, name: str) -> bool:
    """False: it was gone already, or it cannot be removed."""
    try:
        os.unlink(f"{free}/{name}")  # noqa: PTH108 (as above)
    except OSError:
        return False
    return True


def _is_ordinary(status: os.stat_result) -> bool:
    """A regular file of ours under one name: whatever is written to it, nobody else's file changes."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
