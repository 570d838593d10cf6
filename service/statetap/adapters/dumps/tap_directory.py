"""One tap's directory: its beacon, its dumps, its error records, and what does not belong there.

Invariants: every complete dump is posted once for as long as its file is there; only files with names of ours are removed; a live
tap's directory is never removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from statetap_sglang.beacon import Beacon
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.format import BEACON_NAME, REFUSAL_NAME, TOKEN_IDS, DumpFormatError, dump_number, error_number, stem
from statetap_sglang.free_files import hand_back, remove_idle
from statetap_sglang.reader import MappedDump, open_dump
from statetap_sglang.refusal import Refusal
from statetap_sglang.tap import boot_of, remove_dead_tap, tap_is_alive, tap_name

from statetap.adapters.dumps.held import HeldDump, describe
from statetap.adapters.dumps.watching import PER_TURN
from statetap.core.dumps import DumpFacts
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.ports import CaptureLost, DumpEvent, DumpRejected, DumpSeen, TapRefused, TapSeen

_Signature = tuple[int, int]


class TapDirectory:
    """What was posted of one tap. All methods run on the event loop, but for `HeldDump.release`."""

    def __init__(self, path: Path, post: Callable[[DumpEvent], None]) -> None:
        self._path = path
        self._post = post
        self._known: set[str] = set()
        self._reported: set[str] = set()
        self._beacon: tuple[_Signature, bool] | None = None
        self._tap: TapSeen | None = None
        self._bad_beacon: _Signature | None = None
        self._refused: tuple[_Signature, bool] | None = None
        self._recycle_from_bytes: int | None = None
        self._idle: frozenset[str] = frozenset()

    async def scan(self) -> None:
        """Post what is not posted yet, in the counter's order, and remove a dead tap's directory once it holds no dumps."""
        for position, name in enumerate(self._list()):
            self.see(name)
            if position % PER_TURN == PER_TURN - 1:
                await asyncio.sleep(0)
        if not tap_is_alive(self._path):
            # In a thread, like every removal of what may be gigabytes.
            await asyncio.to_thread(remove_dead_tap, self._path)

    async def remove_idle(self) -> None:
        """Remove the free files that nobody took since this was last called: a worker without work holds no memory."""
        self._idle = await asyncio.to_thread(remove_idle, self._path, self._idle)

    def see_all(self) -> None:
        """The same at once, for a tap that just appeared."""
        for name in self._list():
            self.see(name)

    def _list(self) -> list[str]:
        """Names to look at: what the tap says of itself first, then captures in the counter's order."""
        try:
            names = [path.name for path in self._path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Right after the listing: what appears later is posted by events, and must not be forgotten here.
        self._known.intersection_update(names)
        self._reported.intersection_update(names)
        never_seen = self._beacon is None and self._refused is None
        if never_seen and all(_number(name) is None for name in names) and not tap_is_alive(self._path):
            # A dead boot's tap is announced for the sake of its dumps only.
            names = [name for name in names if name not in (BEACON_NAME, REFUSAL_NAME)]
        return sorted(names, key=lambda name: (-1 if (number := _number(name)) is None else number, name))

    def see(self, name: str) -> None:
        """Something called `name` is there, or was a moment ago."""
        try:
            if dump_number(name) is not None:
                self._see_dump(name)
            elif error_number(name) is not None:
                self._see_error(name)
            elif name == BEACON_NAME:
                self._see_beacon(alive=tap_is_alive(self._path))
            elif name == REFUSAL_NAME:
                self._see_refusal(alive=tap_is_alive(self._path))
            else:
                self._see_other(name)
        except FileNotFoundError:
            return
        except DumpFormatError as error:
            self._reject(name, error.reason)
        except OSError as error:
            self._complain(name, f"cannot be read, and is looked at again at every rescan: {error}")

    def _see_dump(self, name: str) -> None:
        if name in self._known:
            return
        path = self._path / name
        tap = self._announced(name)
        if tap is None:
            return
        dump = open_dump(path)
        if dump.metadata.boot_id != boot_of(self._path.name):
            raise DumpFormatError(path, f"is of boot {dump.metadata.boot_id!r}, which is not this tap's")
        self._known.add(name)
        self._post(DumpSeen(HeldDump(self._facts(name, dump, tap), dump, partial(self._release, name))))

    def _announced(self, name: str) -> TapSeen | None:
        """What the beacon says; None while a living tap has none yet: its dumps are posted when it comes.

        Raises:
            DumpFormatError: a dead tap never had one, so nobody can say what its dumps are.
        """
        if self._tap is None:
            with suppress(FileNotFoundError):
                self._see_beacon(alive=tap_is_alive(self._path))
        if self._tap is None and not tap_is_alive(self._path):
            raise DumpFormatError(self._path / name, "its tap never announced what it captures")
        return self._tap

    def _facts(self, name: str, dump: MappedDump, tap: TapSeen) -> DumpFacts:
        metadata = dump.metadata
        return DumpFacts(
            dump_id=f"{self._path.name}/{name}",
            sequence=dump_number(name) or 0,
            rows=metadata.extend_len,
            nbytes=dump.nbytes,
            tensors=describe(dump.tensors),
            capture=tap.capture,
            model_fingerprint=tap.model.model_fingerprint,
            rid=metadata.rid,
            prefix_len=metadata.prefix_len,
            prompt_len=metadata.prompt_len,
            retraction_count=metadata.retraction_count,
            token_ids=bytes(dump.tensors[TOKEN_IDS].data),
            name=f"{self._path.name}/{stem(dump_number(name) or 0)}",
            forward_start_ns=metadata.forward_start_ns,
            forward_end_ns=metadata.forward_end_ns,
        )

    def _release(self, name: str) -> None:
        path = self._path / name
        if self._recycle_from_bytes is None:
            path.unlink(missing_ok=True)
        else:
            hand_back(path, self._recycle_from_bytes)
        self._known.discard(name)

    def _see_error(self, name: str) -> None:
        path = self._path / name
        record = ErrorRecord.read(path)
        counted = "" if record.lost == 1 else f" (the last of {record.lost} lost captures that share this record)"
        # Removed first: what cannot be removed is complained of, not posted again and again.
        path.unlink()
        self._post(CaptureLost(record.rid, record.reason + counted, record.is_for_want_of_room))

    def _see_beacon(self, *, alive: bool) -> None:
        """Post the tap if its beacon is new, or if its publisher came or went."""
        path = self._path / BEACON_NAME
        signature = _signature(path)
        if (signature, alive) == self._beacon or signature == self._bad_beacon:
            return
        try:
            beacon = Beacon.read(self._path)
            if tap_name(beacon.boot_id, beacon.dp_rank) != self._path.name:
                raise DumpFormatError(path, f"is of boot {beacon.boot_id!r}, rank {beacon.dp_rank}, which is not this tap's")
        except DumpFormatError as error:
            # Not removed: the publisher's own, and perhaps of a newer version.
            self._bad_beacon = signature
            self._post(DumpRejected(f"{self._path.name}/{BEACON_NAME}", error.reason))
            return
        first = self._tap is None
        self._beacon = (signature, alive)
        self._recycle_from_bytes = beacon.recycle_from_bytes if alive else None
        self._tap = _tap_seen(self._path.name, beacon, announced_ns=signature[1], alive=alive)
        self._post(self._tap)
        if first:
            self.see_all()

    def _see_refusal(self, *, alive: bool) -> None:
        """Post that the tap refuses to publish, if that is new, or if its publisher came or went."""
        signature = _signature(self._path / REFUSAL_NAME)
        if (signature, alive) == self._refused:
            return
        try:
            reason = Refusal.read(self._path).reason
        except DumpFormatError as error:
            # Whatever it says, it says that the tap publishes nothing.
            reason = f"{REFUSAL_NAME} cannot be read: {error.reason}"
        self._refused = (signature, alive)
        boot = boot_of(self._path.name) or self._path.name
        self._post(TapRefused(self._path.name, boot, reason, alive, announced_ns=signature[1]))

    def _see_other(self, name: str) -> None:
        if not name.startswith("."):
            self._complain(name, "not a name of Statetap's; it is left alone")

    def _reject(self, name: str, reason: str) -> None:
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            self._complain(name, f"{reason}; it could not be removed: {error.strerror}")
            return
        self._post(DumpRejected(f"{self._path.name}/{name}", reason))

    def _complain(self, name: str, reason: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._post(DumpRejected(f"{self._path.name}/{name}", reason))


def _number(name: str) -> int | None:
    number = dump_number(name)
    return error_number(name) if number is None else number


def _signature(path: Path) -> _Signature:
    """What tells a file from another one of its name: its inode, and when it was written."""
    status = path.lstat()
    return status.st_ino, status.st_mtime_ns


def _tap_seen(tap: str, beacon: Beacon, *, announced_ns: int, alive: bool) -> TapSeen:
    return TapSeen(
        tap=tap,
        capture=CaptureSpec(beacon.aux_layer_ids, Final(beacon.final)),
        model=ModelFacts(
            beacon.model_path,
            beacon.model_fingerprint,
            beacon.num_layers,
            beacon.hidden_size,
            beacon.vocab_size,
            beacon.dtype,
        ),
        identity=Identity.TOKENS,
        budget_bytes=beacon.budget_bytes,
        context_length=beacon.context_length,
        chunked_prefill_size=beacon.chunked_prefill_size,
        alive=alive,
        boot=beacon.boot_id,
        dp_rank=beacon.dp_rank,
        dp_size=beacon.dp_size,
        announced_ns=announced_ns,
    )
