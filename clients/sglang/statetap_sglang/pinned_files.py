"""Dump files that stay mapped here and registered with CUDA, so that copies from the device land in the file's own pages.

A pinned file is *ready* (ours, under a name that nobody looks for), *lent* to one capture, or *published*: the service's until it
hands the file back, as it does any dump (`free_files`). It keeps its pages, its mapping and its descriptor all the while.

Invariants:
- It is lent only after the kernel has said that nobody but us has it open or mapped, and to one capture at a time.
- It is never cut or grown: its length is the mapping's, and a dump that is shorter ends in a padding.
- Nothing here reads or writes through the mapping: a file that somebody has cut costs a capture, never a SIGBUS. One that is not
  as it was left is not used again.
- Pages are unregistered, once nothing is on its way to them, before they are unmapped.
- All pinned files together stay within a limit, and their bytes within the tap's budget.

`borrow` and `release` are for the forward path: they wait for no input or output. The rest is for the thread that publishes.
Knows nothing of torch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from statetap_sglang.filesystem import map_writable, rename_noreplace, round_to_pages
from statetap_sglang.free_files import free_names, free_number, is_read_by_nobody
from statetap_sglang.layout import Place
from statetap_sglang.tap import FREE_DIRECTORY, TapError, ensure_private_directory

log = logging.getLogger("statetap")

Pages = npt.NDArray[np.uint8]

# Each keeps a descriptor open.
MAX_PINNED_FILES = 256
# A ready file that no capture has wanted for so long is given back to the system.
IDLE_SECONDS = 60.0
# Files are made in steps of an eighth, so that dumps of about one size share them.
_STEPS = 8
# Captures that found no file, remembered until files are made for them.
_MAX_WANTED = 16


class RegistrationRefused(RuntimeError):
    """CUDA will not take these pages: the message says why."""


class Registration(Protocol):
    """What of CUDA pinned files use."""

    def register(self, pages: Pages) -> None:
        """Let the device copy into these pages without waiting. Raises RegistrationRefused."""

    def unregister(self, pages: Pages) -> None:
        """Wait for copies that are on their way, then take the registration back. Raises RegistrationRefused."""


@dataclass(slots=True, eq=False)
class PinnedFile:
    """One file, under `path`. `number` is that of the dump as which it is published, None while it is ours.

    `modified_ns` is when its contents were last written to by file calls, which copies from a device are not.
    """

    path: Path
    descriptor: int
    pages: Pages = field(repr=False)
    number: int | None = None
    lent: bool = False
    modified_ns: int = 0
    idle_since: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes


@dataclass(frozen=True, slots=True)
class Landing:
    """A lent file, and where in it a dump's tensors arrive."""

    file: PinnedFile
    places: Mapping[str, Place]


class PinnedFiles:
    """The pinned files of a tap, `limit_bytes` of them at most, for dumps of `least_bytes` or more.

    `number in files`: that dump is published in one of them.
    """

    def __init__(
        self,
        tap: Path,
        registration: Registration,
        *,
        limit_bytes: int,
        least_bytes: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._folder = tap / FREE_DIRECTORY
        self._registration = registration
        self._limit_bytes = limit_bytes
        self._least_bytes = least_bytes
        self._clock = clock
        self._mutex = threading.Lock()
        self._ready: list[PinnedFile] = []
        self._published: dict[int, PinnedFile] = {}
        self._wanted: deque[int] = deque(maxlen=_MAX_WANTED)
        self._nbytes = 0
        self._count = 0
        self._gives_up = False
        self._stuck: list[Pages] = []

    @property
    def nbytes(self) -> int:
        """What they hold together, published ones included."""
        return self._nbytes

    def __contains__(self, number: object) -> bool:
        return number in self._published

    def borrow(self, nbytes: int) -> PinnedFile | None:
        """Lend a ready file of `nbytes` or little more. None: there is none; one will be made if there is room."""
        if nbytes < self._least_bytes:
            return None
        with self._mutex:
            # Two steps more at most: what a file is longer than its dump is room that nobody else has.
            # The one that was used last: what is too many is idle.
            fit = (file for file in reversed(self._ready) if nbytes <= file.nbytes <= nbytes + 2 * nbytes // _STEPS)
            file = min(fit, key=lambda file: file.nbytes, default=None)
            if file is not None:
                self._ready.remove(file)
                file.lent = True
            elif not self._gives_up:
                self._wanted.append(_next_step(nbytes))
        return file

    def release(self, file: PinnedFile) -> None:
        """The capture to which the file was lent is done with it. If it was published, it comes back from the service."""
        with self._mutex:
            if file.lent:
                self._make_ready(file)

    def publish(self, file: PinnedFile, number: int, target: Path) -> None:
        """Give a lent file the name of dump `number`, and it to the service.

        Raises:
            OSError: it cannot be renamed; it stays lent.
        """
        file.modified_ns = os.fstat(file.descriptor).st_mtime_ns
        # First: whoever counts dumps meanwhile must not count it twice.
        file.number = number
        self._published[number] = file
        try:
            rename_noreplace(file.path, target)
        except BaseException:
            file.number = None
            del self._published[number]
            raise
        file.path, file.lent = target, False

    def take_back(self) -> None:
        """Make ready what was handed back; give back to the system what was removed, and what has been idle."""
        gone = [(number, file) for number, file in self._published.items() if not os.path.lexists(file.path)]
        # Looked at afterwards: what was handed back, in one step, is there by now.
        handed_back = {free_number(name): name for name in self._names()} if gone else {}
        for number, file in gone:
            if number in handed_back:
                self._take_back(file, number, handed_back[number])
            else:
                del self._published[number]
                self._drop(file)
        with self._mutex:
            ready = list(self._ready)
        long_ago = self._clock() - IDLE_SECONDS
        useless = [file for file in ready if file.idle_since <= long_ago or _is_removed(file)]
        with self._mutex:  # but for those that were lent meanwhile
            useless = [file for file in useless if file in self._ready]
            self._ready = [file for file in self._ready if file not in useless]
        self._drop_all(useless)

    def next_wanted(self) -> int | None:
        """The bytes of a file that a capture has looked for in vain, once for each; None where there can be no more."""
        with self._mutex:
            while self._wanted:
                nbytes = self._wanted.popleft()
                if self._nbytes + nbytes <= self._limit_bytes and self._count < MAX_PINNED_FILES:
                    return nbytes
        return None

    def make(self, number: int, nbytes: int) -> None:
        """Make one of `nbytes`, whole pages, ready; `number` was never used. Where that cannot be, no file is left.

        If the pages cannot be registered, that is logged, and no further file is made.
        """
        path = self._folder / f".{number}.{nbytes}"
        try:
            ensure_private_directory(self._folder)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except (TapError, OSError):
            return
        try:
            # All pages now: a hole that finds the tmpfs full later would be a fault, not an error.
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            _remove(path, descriptor)
            return
        try:
            pages = map_writable(descriptor, nbytes)
            self._registration.register(pages)
        except Exception as error:  # noqa: BLE001 (whatever CUDA says, captures go through the ring)
            _remove(path, descriptor)
            self._give_up(f"{nbytes} bytes of {path} could not be registered with CUDA: {error}")
            return
        with self._mutex:
            self._nbytes += nbytes
            self._count += 1
            self._make_ready(PinnedFile(path, descriptor, pages))

    def remove(self, nbytes: int) -> int:
        """Give ready files back to the system until `nbytes` or more are gained, the largest first. Returns what was gained."""
        gained = 0
        useless = []
        with self._mutex:
            self._ready.sort(key=lambda file: file.nbytes)
            while self._ready and gained < nbytes:
                useless.append(self._ready.pop())
                gained += useless[-1].nbytes
        self._drop_all(useless)
        return gained

    def close(self) -> None:
        """Let go of all files but those that are lent. Published dumps stay: they belong to the service."""
        published = list(self._published.values())
        self._published.clear()
        with self._mutex:
            ready, self._ready = self._ready, []
            self._gives_up = True
        self._drop_all([*published, *ready])

    def _make_ready(self, file: PinnedFile) -> None:
        file.lent = False
        file.idle_since = self._clock()
        self._ready.append(file)

    def _names(self) -> list[str]:
        try:
            return free_names(os.fspath(self._folder))
        except OSError:
            return []

    def _take_back(self, file: PinnedFile, number: int, name: str) -> None:
        free, path = self._folder / name, self._folder / f".{name}"
        try:
            rename_noreplace(free, path)
        except OSError:
            return  # removed meanwhile
        usable = False
        with suppress(OSError):
            if _is_as_it_was(file, path):
                usable = is_read_by_nobody(file.descriptor)
                if not usable:
                    rename_noreplace(path, free)
                    return
        del self._published[number]
        file.path, file.number = path, None
        if not usable:
            self._drop(file)
            return
        with self._mutex:
            self._make_ready(file)

    def _drop_all(self, files: Iterable[PinnedFile]) -> None:
        for file in files:
            self._drop(file)

    def _drop(self, file: PinnedFile) -> None:
        """Let go of a file that is neither ready nor lent, and remove it if it is ours."""
        if file.number is None:
            _remove(file.path, file.descriptor)
        else:
            os.close(file.descriptor)
        try:
            self._registration.unregister(file.pages)
        except Exception as error:  # noqa: BLE001 (as above)
            # Pages that the device may know of must stay mapped, and go on to count.
            self._stuck.append(file.pages)
            self._give_up(f"{file.nbytes} bytes could not be unregistered from CUDA: {error}")
            return
        with self._mutex:
            self._nbytes -= file.nbytes
            self._count -= 1

    def _give_up(self, reason: str) -> None:
        if not self._gives_up:
            log.warning("%s; no more dump files are registered, states go through the pinned ring", reason)
        self._gives_up = True
        self._wanted.clear()


def _next_step(nbytes: int) -> int:
    """`nbytes` or up to an eighth more, whole pages, so that sizes that are about equal become equal."""
    step = max(1 << (nbytes.bit_length() - 1), _STEPS) // _STEPS
    return round_to_pages(-(-nbytes // step) * step)


def _is_removed(file: PinnedFile) -> bool:
    return os.fstat(file.descriptor).st_nlink == 0


def _is_as_it_was(file: PinnedFile, path: Path) -> bool:
    """Whether it is this file that lies there, under one name, and nobody has cut it or written to it since it was published."""
    there, ours = path.lstat(), os.fstat(file.descriptor)
    return (there.st_dev, there.st_ino, there.st_nlink, there.st_size, there.st_mtime_ns) == (
        ours.st_dev,
        ours.st_ino,
        1,
        file.nbytes,
        file.modified_ns,
    )


def _remove(path: Path, descriptor: int) -> None:
    os.close(descriptor)
    with suppress(OSError):
        path.unlink()
