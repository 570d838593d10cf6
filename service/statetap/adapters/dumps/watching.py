"""What both dump sources do alike: watch directories, look at everything now and then, and miss nothing in between.

Invariants: a directory is watched before it is listed; a full event queue leads to a rescan; everything is posted from the event
loop, and nothing after `close`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncinotify import Inotify, Mask, Watch
from statetap_sglang.tap import TapError, ensure_private_directory

from statetap.ports import Clock, DumpEvent, DumpRejected, DumpSourceError

# The loop belongs to others too: after so many dumps, or events that fill so much, they get their turn.
PER_TURN = 16
BYTES_PER_TURN = 1024
# inotify(7), struct inotify_event: wd, mask, cookie, len, and a name of len bytes that ends with zeros.
_EVENT = struct.Struct("iIII")
_Q_OVERFLOW, _IGNORED = 0x4000, 0x8000
_WATCH_FLAGS = Mask.ONLYDIR | Mask.DONT_FOLLOW
_Identity = tuple[int, int, int, int]


class WatchingSource(ABC):
    """A dump source over one directory, which must be ours alone."""

    def __init__(self, *directories: Path, clock: Clock, rescan_seconds: float) -> None:
        """`directories` from the outermost on are made private; the last one is watched."""
        self._directories = directories
        self._directory = directories[-1]
        self._clock = clock
        self._rescan_seconds = rescan_seconds
        self._listener: Callable[[DumpEvent], None] | None = None
        self._inotify: Inotify | None = None
        self._watches: dict[Path, Watch] = {}
        self._watched: dict[int, Path] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._fault: Exception | None = None
        self._overflowed = asyncio.Event()
        self._scanning = asyncio.Lock()
        self._held: int | None = None
        self._sure_of: list[_Identity] | None = None

    async def start(self, post: Callable[[DumpEvent], None]) -> None:
        """See the port. Events that come while this runs wait for its end.

        Raises:
            DumpSourceError: the directory cannot be used, or the system has no more inotify instances.
        """
        self._listener = post
        try:
            self._inotify = Inotify()
        except OSError as error:
            way_out = "raise fs.inotify.max_user_instances, or close other watchers"
            raise DumpSourceError(f"{self._directory} cannot be watched: {error.strerror}; {way_out}") from error
        try:
            await self._prepare()
            await self.rescan()
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._look_now_and_then()), asyncio.create_task(self._look_after_overflow())]
        # The loop calls back as long as events are there. Read here and not by asyncinotify, whose future, path and flags for
        # each event take ten times as long.
        asyncio.get_running_loop().add_reader(self._inotify.fd, self._follow)

    async def rescan(self) -> None:
        """See the port.

        Raises:
            DumpSourceError: the directory is not usable any more.
        """
        # A watcher that died of a bug must not look like silence.
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        if self._fault is not None:
            raise self._fault
        async with self._scanning:
            try:
                self._make_sure()
                await self._scan()
            except (OSError, TapError) as error:
                raise DumpSourceError(str(error)) from error

    async def close(self) -> None:
        self._listener = None
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._watches.clear()
        self._watched.clear()
        if self._held is not None:
            os.close(self._held)
            self._held = None
        self._sure_of = None
        fault, self._fault = self._fault, None
        for result in (*results, fault):
            if isinstance(result, Exception):
                raise result

    @property
    @abstractmethod
    def _root_mask(self) -> Mask:
        """What to watch the directory itself for."""

    @abstractmethod
    async def _prepare(self) -> None:
        """What must happen before the first look."""

    @abstractmethod
    async def _scan(self) -> None:
        """Look at everything that is visible now."""

    @abstractmethod
    async def _remove_idle(self) -> None:
        """Called now and then: remove what is kept only to be used again, and was not. Must not raise OSError."""

    @abstractmethod
    def _notice(self, directory: Path, name: str) -> None:
        """Something called `name` appeared in a watched directory. Must not raise OSError."""

    def _make_sure(self) -> None:
        """That the directories are there, ours alone, held and watched: of those that are as they were, one look tells.

        They cannot be others than they were: the last one is held open, so that its number is not given to a new one.

        Raises:
            TapError: a directory cannot be used.
        """
        with suppress(FileNotFoundError):
            if self._sure_of == [_identity(os.lstat(directory)) for directory in self._directories]:
                return
        self._sure_of = None
        for directory in self._directories:
            ensure_private_directory(directory)
        held = self._hold()
        self._watch(self._directory, self._root_mask)
        self._sure_of = [*(_identity(os.lstat(outer)) for outer in self._directories[:-1]), _identity(os.fstat(held))]

    def _hold(self) -> int:
        """Keep the directory to this source: two would release each other's dumps, and by count take each other's.

        Returns its descriptor.

        Raises:
            TapError: another source has it.
        """
        if self._held is not None and os.fstat(self._held).st_ino == self._directory.stat().st_ino:
            return self._held
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            whose = "another worker of this service, or another service"
            raise TapError(f"{self._directory} is watched for {whose}; give each worker a directory of its own") from error
        if self._held is not None:
            os.close(self._held)
        self._held = descriptor
        return descriptor

    def _post(self, event: DumpEvent) -> None:
        if self._listener is not None:
            self._listener(event)

    def _watch(self, directory: Path, mask: Mask) -> None:
        """Watch a directory; doing it again costs a system call and changes nothing."""
        if self._inotify is not None:
            watch = self._watches[directory] = self._inotify.add_watch(directory, mask | _WATCH_FLAGS)
            self._watched[watch.wd] = directory

    def _unwatch(self, directory: Path) -> None:
        watch = self._watches.pop(directory, None)
        if watch is not None and self._inotify is not None:
            self._watched.pop(watch.wd, None)
            with suppress(OSError):  # the kernel dropped it with the directory
                self._inotify.rm_watch(watch)

    def _follow(self) -> None:
        """Take events that are there: as many as are read at once."""
        if self._inotify is None:
            return
        with self._keeping_faults():
            events = os.read(self._inotify.fd, BYTES_PER_TURN)
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                self._take(watch, mask, events[at - length : at].rstrip(b"\0"))

    @contextmanager
    def _keeping_faults(self) -> Iterator[None]:
        """What goes wrong in it ends the watching, and is raised by the next rescan."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self._fault = error
            if self._inotify is not None:
                asyncio.get_running_loop().remove_reader(self._inotify.fd)

    def _take(self, watch: int, mask: int, name: bytes) -> None:
        if mask & _Q_OVERFLOW:
            self._overflowed.set()
        elif mask & _IGNORED:
            self._watched.pop(watch, None)
        elif name and (directory := self._watched.get(watch)) is not None:
            self._notice(directory, os.fsdecode(name))

    async def _look_now_and_then(self) -> None:
        while True:
            await self._clock.sleep(self._rescan_seconds)
            await self._look()
            await self._remove_idle()

    async def _look_after_overflow(self) -> None:
        while True:
            await self._overflowed.wait()
            self._overflowed.clear()
            await self._look()

    async def _look(self) -> None:
        try:
            await self.rescan()
        except DumpSourceError as error:
            self._post(DumpRejected(os.fspath(self._directory), str(error)))


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_mode, status.st_uid
