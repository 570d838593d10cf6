"""Publishes dumps: atomic, never replacing, page-aligned, within a byte budget, and never silent about a loss.

What is visible is complete: a dump is written under a dot-name with `write()`, never through a mapping (a full tmpfs must be an
error, not a SIGBUS), and renamed to its final name without replacing. It is written over a file that the service has handed back
where there is one (`free_files`); free files count towards the budget, and go first when there is no room. Every method may be
called from any thread; no lock is held while a dump is written, and `reserve` waits for no other call's input or output. What
arrives in its file without being written is `in_place`'s.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from statetap_sglang import header
from statetap_sglang.beacon import Beacon
from statetap_sglang.error_record import OVER_BUDGET, ErrorRecord
from statetap_sglang.filesystem import read_small, rename_noreplace, round_to_pages, write_all
from statetap_sglang.format import (
    AUX_HIDDEN_STATES,
    HIDDEN_TENSORS,
    LAST_HIDDEN_STATES,
    LAST_HIDDEN_STATES_PRENORM,
    MODEL_DTYPES,
    ROW_CHECKSUMS,
    TOKEN_IDS,
    DumpFormatError,
    DumpMetadata,
    TensorView,
    check_tensors,
    dump_name,
    dump_number,
    error_name,
    error_number,
)
from statetap_sglang.free_files import FreeFiles, TakenFile, is_read_by_nobody
from statetap_sglang.pinned_files import PinnedFiles
from statetap_sglang.tap import (
    COUNTER_NAME,
    TapError,
    check_name,
    ensure_private_directory,
    lock_tap,
    sweep_free,
    sweep_unpublished,
    tap_name,
)

MAX_ERROR_RECORDS = 1000
# The counter's file is written once for so many numbers; a publisher that dies skips the rest of them.
_NUMBERS_AT_ONCE = 1024


class PublishError(RuntimeError):
    """A dump that could not be published: over budget, no space, directory gone. `rid` names the request."""

    def __init__(self, rid: str, reason: str) -> None:
        super().__init__(f"request {rid}: {reason}")
        self.rid = rid
        self.reason = reason


class DumpPublisher:
    """The one publisher of a tap directory `<root>/<worker>/<boot_id>-<dp_rank>/` (mode 0700, locked by flock).

    Raises:
        TapError: the directory cannot be used, or another publisher holds it.
        OSError: no space for the counter's file.
        ValueError: the worker's name cannot be part of a path.
    """

    def __init__(self, root: Path, worker: str, beacon: Beacon, *, max_error_records: int = MAX_ERROR_RECORDS) -> None:
        check_name("worker", worker)
        self._beacon = beacon
        self._max_error_records = max_error_records
        self._directory = root / worker / tap_name(beacon.boot_id, beacon.dp_rank)
        self._pinned: PinnedFiles | None = None
        self._mutex = threading.Lock()
        self._restore_mutex = threading.Lock()
        self._counter_mutex = threading.Lock()  # taken last, and never held while anything but the counter is written
        for directory in (root, root / worker):
            ensure_private_directory(directory)
        self._lock: int | None = lock_tap(self._directory)
        try:
            sweep_unpublished(self._directory)
            self._free = FreeFiles(self._directory)
            self._in_flight = 0
            self._held, self._error_records, newest = self._scan()
            self._next = self._reserved_to = max(newest + 1, self._read_counter())
            self._reserve_numbers()
            if not self._has_leases():
                self._beacon = replace(beacon, recycle_from_bytes=None)
        except BaseException:
            self.close()
            raise
        self._late: deque[tuple[int | None, ErrorRecord]] = deque()
        self._uncounted: ErrorRecord | None = None
        self._counting: Path | None = None
        self._announced = False

    @property
    def directory(self) -> Path:
        return self._directory

    def announce(self) -> None:
        """Write the beacon: the tap is ready."""
        self._beacon.write(self._directory)
        self._announced = True

    def reserve(self) -> int:
        """Take a dump number: a dump can be named before it is written. A number that is never used leaves a gap, no harm.

        Raises:
            OSError: the counter's file cannot be written. It is, once for many numbers.
        """
        return self._take_number()

    def publish(self, metadata: DumpMetadata, tensors: Mapping[str, TensorView], number: int | None = None) -> str:
        """Publish one dump and return its name, `req_<N>.safetensors`; `number` is a reserved N, by default the next one.

        `tensors` holds `token_ids` (I32 `[T]`), the hidden tensors of the tap's capture spec, `T = extend_len` rows each, and
        the rows' checksums (I64 `[T]`; see `checksum`) if the source took them.

        Raises:
            PublishError: over budget, disk full, or any other failure of the file system; nothing is left behind.
            ValueError: the tensors do not fit the metadata or each other: a programming error.
        """
        self._check(metadata, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
        ordered = {name: tensors[name] for name in (TOKEN_IDS, *HIDDEN_TENSORS, ROW_CHECKSUMS) if name in tensors}
        pieces = header.encode(ordered, metadata.to_map(), page_aligned=True)
        length = sum(len(piece) for piece in pieces)
        nbytes = round_to_pages(length)
        try:
            with self._mutex:
                self._write_late()
                name = dump_name(self._take_number() if number is None else number)
                taken = self._take_room(length)
            published = False
            try:
                self._write(name, pieces, taken)
                published = True
            finally:
                with self._mutex:
                    self._in_flight -= nbytes
                    self._held += nbytes if published else 0
        except OSError as error:
            raise PublishError(metadata.rid, f"{self._directory}: {error.strerror or error}") from error
        return name

    def publish_error(self, rid: str, reason: str, number: int | None = None) -> None:
        """Publish `req_<N>.error.json`: a capture that was lost, and why. Bounded in number; never raises.

        `number` is a reserved N, that of the dump that was not to be; by default the next one.
        Beyond the bound one further record counts the losses and names the last. What cannot be written now (a full tmpfs) is
        written with the next dump or error that is published.
        """
        with self._mutex:
            self._late.append((number, ErrorRecord(rid, reason)))
            self._write_late()

    def close(self) -> None:
        """Remove the free files and release the lock. Published dumps stay: they belong to the service."""
        if self._lock is not None:
            sweep_free(self._directory)
            os.close(self._lock)
            self._lock = None

    def _check(self, metadata: DumpMetadata, described: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        beacon = self._beacon
        if metadata.boot_id != beacon.boot_id:
            raise ValueError(f"the dump is of boot {metadata.boot_id!r}, the tap of {beacon.boot_id!r}")
        check_tensors(described, metadata.extend_len)
        dtype, rows, width = MODEL_DTYPES[beacon.dtype], metadata.extend_len, beacon.hidden_size
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {TOKEN_IDS: ("I32", (rows,))}
        if beacon.aux_layer_ids:
            wanted[AUX_HIDDEN_STATES] = (dtype, (rows, len(beacon.aux_layer_ids), width))
        if beacon.final in ("post_norm", "both"):
            wanted[LAST_HIDDEN_STATES] = (dtype, (rows, width))
        if beacon.final in ("pre_norm", "both"):
            wanted[LAST_HIDDEN_STATES_PRENORM] = (dtype, (rows, width))
        if ROW_CHECKSUMS in described:
            wanted[ROW_CHECKSUMS] = ("I64", (rows,))
        if described != wanted:
            raise ValueError(f"the tap publishes {wanted}, not {described}")

    def _write(self, name: str, pieces: list[bytes | memoryview], taken: TakenFile | None = None) -> None:
        """Write a file, over a free one that was taken for it or anew, and give it its name."""
        unpublished = self._directory / f".{name}" if taken is None else taken.path
        try:
            descriptor = self._create(unpublished) if taken is None else taken.descriptor
            try:
                self._fill(descriptor, pieces)
            finally:
                os.close(descriptor)
            rename_noreplace(unpublished, self._directory / name)
        except BaseException:
            with suppress(OSError):
                unpublished.unlink(missing_ok=True)
            raise

    def _create(self, unpublished: Path) -> int:
        if self._lock is None:
            raise OSError("the publisher is closed")
        if not self._directory.exists():
            try:
                self._restore_directory()
            except TapError as error:
                raise OSError(str(error)) from error
        return os.open(unpublished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _fill(self, descriptor: int, pieces: list[bytes | memoryview]) -> None:
        """Write from the start; where the file system is full, free files make room."""
        while True:
            os.lseek(descriptor, 0, os.SEEK_SET)
            try:
                return write_all(descriptor, pieces)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._remove_free(sum(map(len, pieces))):
                    raise

    def _take_room(self, length: int) -> TakenFile | None:
        """Reserve so much of the budget, and take a free file to write over if there is one that is fit for it.

        What the service has removed is noticed when the running total would exceed the budget.
        """
        nbytes = round_to_pages(length)
        taken = self._free.take(length) if self._lock is not None else None
        self._held -= taken.held_bytes if taken else 0
        try:
            self._make_room(nbytes)
        except BaseException:
            if taken is not None:
                os.close(taken.descriptor)
                taken.path.unlink(missing_ok=True)
            raise
        self._in_flight += nbytes
        return taken

    def _make_room(self, nbytes: int) -> None:
        """Remove free files until `nbytes` are within the budget; OSError if that is not enough."""
        if nbytes > self._beacon.budget_bytes:
            raise OSError(f"a dump of {nbytes} bytes does not fit a budget of {self._beacon.budget_bytes}; raise the budget")
        if self._excess(nbytes) > 0:
            self._held, self._error_records, _ = self._scan()
        while (excess := self._excess(nbytes)) > 0 and self._remove_free(excess):
            self._held, self._error_records, _ = self._scan()
        if excess > 0:
            held = f"{self._held_in_all} of {self._beacon.budget_bytes} are held"
            raise OSError(f"{nbytes} {OVER_BUDGET}: {held}; let the service release dumps, or raise the budget")

    def _remove_free(self, nbytes: int) -> int:
        return self._free.remove(nbytes) or (self._pinned.remove(nbytes) if self._pinned else 0)

    def _excess(self, nbytes: int) -> int:
        return self._held_in_all + nbytes - self._beacon.budget_bytes

    @property
    def _held_in_all(self) -> int:
        return self._held + self._in_flight + (self._pinned.nbytes if self._pinned else 0)

    def _has_leases(self) -> bool:
        """Whether the kernel can say that nobody reads a file of this directory any more."""
        descriptor = os.open(self._directory / COUNTER_NAME, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            is_read_by_nobody(descriptor)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _scan(self) -> tuple[int, int, int]:
        """Bytes of dumps and of free files, pinned ones apart; number of error records; and the highest number in use (-1: none).

        Free files are looked at last: what is handed back meanwhile counts twice, and is never missed.
        """
        nbytes, records, newest = 0, 0, -1
        for entry in os.scandir(self._directory):
            number = dump_number(entry.name)
            if number is not None:
                with suppress(FileNotFoundError):  # released meanwhile
                    pinned = self._pinned is not None and number in self._pinned
                    nbytes += 0 if pinned else round_to_pages(entry.stat(follow_symlinks=False).st_size)
            elif (number := error_number(entry.name)) is not None:
                records += 1
            newest = max(newest, -1 if number is None else number)
        return nbytes + self._free.nbytes, records, newest

    def _has_room_for_record(self) -> bool:
        if self._error_records >= self._max_error_records:
            with suppress(OSError):
                self._held, self._error_records, _ = self._scan()
        return self._error_records < self._max_error_records

    def _write_late(self) -> None:
        """Write the error records that wait, in their order, as far as that goes now."""
        while self._late:
            number, record = self._late[0]
            if not self._has_room_for_record() or len(self._late) > self._max_error_records:
                self._count(record)
                self._late.popleft()
                continue
            try:
                self._write(error_name(self._take_number() if number is None else number), [record.encode()])
            except FileExistsError:
                self._late[0] = (None, record)
            except OSError:
                return
            else:
                self._error_records += 1
                self._late.popleft()
        self._write_counting()

    def _count(self, record: ErrorRecord) -> None:
        lost = record.lost + (self._uncounted.lost if self._uncounted else 0)
        self._uncounted = ErrorRecord(record.rid, record.reason, lost)

    def _write_counting(self) -> None:
        """Write the record that counts, in place of its last version if that was not read yet."""
        if self._uncounted is None:
            return
        try:
            if self._counting is None or not self._counting.exists():
                name = error_name(self._take_number())
                self._write(name, [self._uncounted.encode()])
                self._counting = self._directory / name
                self._uncounted = None
                return
            written = ErrorRecord.read(self._counting)
            sum_of_both = ErrorRecord(self._uncounted.rid, self._uncounted.reason, self._uncounted.lost + written.lost)
            unpublished = self._directory / f".{self._counting.name}"
            unpublished.write_bytes(sum_of_both.encode())
            unpublished.replace(self._counting)
            self._uncounted = None
        except (OSError, DumpFormatError):
            return  # it stays in memory, and is tried again

    def _restore_directory(self) -> None:
        """Somebody removed the tap's directory: make it again, with its lock, its counter and its beacon."""
        with self._restore_mutex:
            if self._directory.exists():
                return
            for directory in self._directory.parent.parent, self._directory.parent:
                ensure_private_directory(directory)
            lock = lock_tap(self._directory)
            lost, self._lock = self._lock, lock
            if lost is not None:
                os.close(lost)
            with self._counter_mutex:
                self._reserve_numbers()
            if self._announced:
                self.announce()

    def _read_counter(self) -> int:
        try:
            return int(read_small(self._directory / COUNTER_NAME, 64))
        except FileNotFoundError:
            return 0

    def _take_number(self) -> int:
        with self._counter_mutex:
            if self._next >= self._reserved_to:
                self._reserve_numbers()
            self._next += 1
            return self._next - 1

    def _reserve_numbers(self) -> None:
        """Keep the counter's upper bound in a file: no number is used again, even if all dumps were removed meanwhile."""
        reserved_to = self._next + _NUMBERS_AT_ONCE
        descriptor = os.open(self._directory / COUNTER_NAME, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Always of one length, so that it overwrites in place and needs no space once it is there.
            os.pwrite(descriptor, b"%020d" % reserved_to, 0)
        finally:
            os.close(descriptor)
        self._reserved_to = reserved_to
