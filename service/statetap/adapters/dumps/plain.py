"""The dumps of a hand-patched server: `req_<N>/` directories without identity, under a tap that configuration declares."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import stat
from functools import partial
from pathlib import Path

from asyncinotify import Mask
from statetap_sglang.format import DumpFormatError
from statetap_sglang.plain import PlainDump, PlainLayout, is_complete, open_plain_dump, plain_number

from statetap.adapters.dumps.held import HeldDump, describe
from statetap.adapters.dumps.watching import PER_TURN, WatchingSource
from statetap.core.dumps import DumpFacts
from statetap.ports import Clock, DumpRejected, DumpSeen, DumpSourceError, TapSeen

_REMOVED_SUFFIX = ".removed"


class PlainDumpSource(WatchingSource):
    """Watches one directory of plain dumps; `tap` is posted at the start, as declared.

    A directory whose last file does not come within `torn_after_seconds` is torn: reported at the next rescan, and removed.

    Raises:
        ValueError: the layout's tensors are not those of the tap's capture spec.
    """

    def __init__(
        self,
        directory: Path,
        layout: PlainLayout,
        tap: TapSeen,
        *,
        clock: Clock,
        rescan_seconds: float = 30.0,
        torn_after_seconds: float = 60.0,
    ) -> None:
        wanted = {array.name for array in tap.capture.hidden_arrays(tap.model)}
        if wanted != set(layout.tensors) or layout.aux_layers != len(tap.capture.aux_layer_ids):
            raise ValueError(
                f"the layout has {sorted(layout.tensors)} with {layout.aux_layers} layers, "
                f"the capture spec {sorted(wanted)} with {len(tap.capture.aux_layer_ids)}; make them agree"
            )
        super().__init__(directory, clock=clock, rescan_seconds=rescan_seconds)
        self._layout = layout
        self._tap = tap
        self._torn_after_seconds = torn_after_seconds
        # Servers may start their counter anew, so a name alone says nothing: name → inode of what was posted.
        self._known: dict[str, int] = {}
        self._incomplete: dict[str, float] = {}
        self._reported: set[str] = set()

    @property
    def _root_mask(self) -> Mask:
        return Mask.MOVED_TO if self._layout.published_by == "rename" else Mask.MOVED_TO | Mask.CREATE

    async def _prepare(self) -> None:
        if self._layout.kind == "pt":
            try:
                await asyncio.to_thread(importlib.import_module, "torch")
            except ImportError as error:
                raise DumpSourceError(
                    f"{self._directory}: .pt dumps need torch ({error}); install it, or publish safetensors"
                ) from error
        self._post(self._tap)

    async def _scan(self) -> None:
        with os.scandir(self._directory) as entries:
            present = {entry.name: entry.inode() for entry in entries}
        self._reported &= present.keys()
        for gone in set(self._known) - present.keys():
            self._known.pop(gone, None)
        for gone in self._incomplete.keys() - present.keys():
            self._settle(gone)
        # Strict mode looks after each request: what was posted costs it no system call of its own.
        names = [name for name, inode in present.items() if self._known.get(name) != inode]
        for position, name in enumerate(sorted(names, key=_directory_order)):
            if name.startswith(".") and name.endswith(_REMOVED_SUFFIX):
                shutil.rmtree(self._directory / name, ignore_errors=True)
            self._see(name)
            if position % PER_TURN == PER_TURN - 1:
                await asyncio.sleep(0)

    async def _remove_idle(self) -> None:
        """Nothing: plain dumps are removed when they are released."""

    def _notice(self, directory: Path, name: str) -> None:
        self._see(name if directory == self._directory else directory.name)

    def _see(self, name: str) -> None:
        """Something called `name` is there, or was a moment ago."""
        number = plain_number(name)
        if number is None:
            if not name.startswith("."):
                self._complain(name, "not a name of a dump; it is left alone")
            return
        path = self._directory / name
        try:
            status = path.lstat()
            if self._known.get(name) == status.st_ino:
                return
            if not stat.S_ISDIR(status.st_mode):
                raise DumpFormatError(path, "not a directory")  # symbolic links are never followed
            if not self._has_come(path):
                return
            dump = open_plain_dump(path, self._layout)
            self._settle(name)
            self._known[name] = status.st_ino
            self._post(DumpSeen(HeldDump(self._facts(name, number, dump), dump, partial(self._release, name, status.st_ino))))
        except FileNotFoundError:
            self._settle(name)
        except DumpFormatError as error:
            self._reject(name, error.reason)
        except OSError as error:
            self._complain(name, f"cannot be read, and is looked at again at every rescan: {error}")

    def _facts(self, name: str, number: int, dump: PlainDump) -> DumpFacts:
        return DumpFacts(
            dump_id=f"{self._tap.tap}/{name}",
            sequence=number,
            rows=dump.rows,
            nbytes=dump.nbytes,
            tensors=describe(dump.tensors),
            capture=self._tap.capture,
            model_fingerprint=self._tap.model.model_fingerprint,
        )

    def _has_come(self, path: Path) -> bool:
        """Whether the file written last is there; if not, wait for it. DumpFormatError: it has not come in time."""
        if is_complete(path, self._layout):
            return True
        since = self._incomplete.setdefault(path.name, self._clock.monotonic())
        self._watch(path, Mask.CREATE | Mask.MOVED_TO)
        if is_complete(path, self._layout):  # it may have come before the watch
            return True
        waited = self._clock.monotonic() - since
        if waited >= self._torn_after_seconds:
            raise DumpFormatError(path, f"torn: {self._layout.published_by} has not come within {waited:.0f} s")
        return False

    def _settle(self, name: str) -> None:
        """Stop waiting for the rest of a directory."""
        if self._incomplete.pop(name, None) is not None:
            self._unwatch(self._directory / name)

    def _release(self, name: str, inode: int) -> None:
        self._remove(name)
        if self._known.get(name) == inode:
            del self._known[name]

    def _remove(self, name: str) -> None:
        """Take it out of sight in one step, so that nobody meets half of it; then remove the files."""
        path, aside = self._directory / name, self._directory / f".{name}{_REMOVED_SUFFIX}"
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(aside, ignore_errors=True)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside)

    def _reject(self, name: str, reason: str) -> None:
        self._settle(name)
        try:
            self._remove(name)
        except OSError as error:
            self._complain(name, f"{reason}; it could not be removed: {error.strerror}")
            return
        self._post(DumpRejected(f"{self._tap.tap}/{name}", reason))

    def _complain(self, name: str, reason: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._post(DumpRejected(f"{self._tap.tap}/{name}", reason))


def _directory_order(name: str) -> tuple[int, str]:
    number = plain_number(name)
    return (-1 if number is None else number, name)
