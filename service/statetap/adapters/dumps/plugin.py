"""The dumps of a worker that runs the plugin: `<root>/<worker>/`, one directory a tap (contract §2)."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

from asyncinotify import Mask
from statetap_sglang.tap import boot_of, check_name

from statetap.adapters.dumps.tap_directory import TapDirectory
from statetap.adapters.dumps.watching import PER_TURN, WatchingSource
from statetap.ports import Clock, DumpRejected

# Dumps, error records and beacons are all renamed into place: nobody needs to hear of the dot-names that come first.
_TAP_MASK = Mask.MOVED_TO
# An answer often comes right behind its dump, and goes first: its worker waits for what follows from it, for a dump nobody does.
PATIENCE_SECONDS = 0.001
# What is noticed beyond these is found by a look at the whole directory.
MOST_NOTICED = 4096


class PluginDumpSource(WatchingSource):
    """Watches a worker's taps, those that are there and those of later boots.

    A tap is posted when its beacon appears or is replaced, and again when a rescan finds that its publisher came or went. A dead
    tap's dumps are posted like any others; its directory is removed by a rescan once they are released.

    Raises:
        ValueError: the worker's name cannot be part of a path.
    """

    def __init__(self, root: Path, worker: str, *, clock: Clock, rescan_seconds: float = 30.0) -> None:
        check_name("worker", worker)
        super().__init__(root, root / worker, clock=clock, rescan_seconds=rescan_seconds)
        self._taps: dict[str, TapDirectory] = {}
        self._reported: set[str] = set()
        self._noticed: deque[tuple[str, str]] = deque()
        self._next_look: asyncio.Handle | None = None

    @property
    def _root_mask(self) -> Mask:
        return Mask.CREATE | Mask.MOVED_TO

    async def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._noticed.clear()
        await super().close()

    async def _prepare(self) -> None:
        """Nothing: every look makes the directory sure."""

    async def _scan(self) -> None:
        names = sorted(path.name for path in self._directory.iterdir())
        for gone in self._taps.keys() - set(names):
            del self._taps[gone]
            self._unwatch(self._directory / gone)
        self._reported.intersection_update(names)
        for name in names:
            tap = self._tap(name)
            if tap is not None:
                await tap.scan()

    async def _remove_idle(self) -> None:
        for tap in list(self._taps.values()):
            await tap.remove_idle()

    def _notice(self, directory: Path, name: str) -> None:
        if directory != self._directory:
            if len(self._noticed) == MOST_NOTICED:
                self._overflowed.set()
                return
            self._noticed.append((directory.name, name))
            if len(self._noticed) == 1:
                self._next_look = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._see_next)
            return
        known = name in self._taps
        tap = self._tap(name)
        if tap is not None and not known:
            tap.see_all()  # its first files may have come before the watch

    def _see_next(self) -> None:
        """See one thing that was noticed, or some of many; the others in the loop's next turns, so that it hears of answers."""
        count = min(1 + len(self._noticed) // PER_TURN, PER_TURN)
        seen = [self._noticed.popleft() for _ in range(count)]
        if self._noticed:
            self._next_look = asyncio.get_running_loop().call_soon(self._see_next)
        with self._keeping_faults():
            for tap, name in seen:
                if tap in self._taps:
                    self._taps[tap].see(name)

    def _tap(self, name: str) -> TapDirectory | None:
        """The tap of that name, watched; None for what is no tap, which is reported once."""
        path = self._directory / name
        try:
            if boot_of(name) is None or path.is_symlink() or not path.is_dir():
                self._complain(name, "not a tap's directory; it is left alone")
                return None
            self._watch(path, _TAP_MASK)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(name, f"cannot be watched: {error.strerror}; raise fs.inotify.max_user_watches")
        return self._taps.setdefault(name, TapDirectory(path, self._post))

    def _complain(self, name: str, reason: str) -> None:
        if not name.startswith(".") and name not in self._reported and os.path.lexists(self._directory / name):
            self._reported.add(name)
            self._post(DumpRejected(name, reason))
