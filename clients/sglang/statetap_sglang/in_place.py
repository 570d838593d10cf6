"""Publishes dumps whose tensors have arrived in their own file: only the header is written, and nothing copies the payload.

Pinned files count towards the budget as long as they are mapped here, whoever has them. Ready ones go before a capture is
refused.
"""

from __future__ import annotations

from pathlib import Path

from statetap_sglang.beacon import Beacon
from statetap_sglang.format import DumpMetadata, dump_name
from statetap_sglang.free_files import FreeFiles
from statetap_sglang.header import encode_head
from statetap_sglang.pinned_files import Landing, PinnedFiles, Registration
from statetap_sglang.publisher import DumpPublisher, PublishError


class InPlacePublisher(DumpPublisher):
    """A `DumpPublisher` that has pinned files, too, of `limit_bytes` at most; none where the kernel grants no leases.

    `publish_in_place` and `tend` are for one thread.
    """

    def __init__(self, root: Path, worker: str, beacon: Beacon, *, registration: Registration, limit_bytes: int) -> None:
        super().__init__(root, worker, beacon)
        least_bytes = self._beacon.recycle_from_bytes
        if least_bytes is not None:
            self._pinned = PinnedFiles(self._directory, registration, limit_bytes=limit_bytes, least_bytes=least_bytes)
            self._free = FreeFiles(self._directory, self._pinned)

    @property
    def pinned(self) -> PinnedFiles | None:
        return self._pinned

    def publish_in_place(self, metadata: DumpMetadata, landing: Landing, number: int) -> str:
        """Publish the dump that has arrived in `landing` as number `number`, which is reserved. Returns its name.

        Raises:
            PublishError: the file system failed; the file stays lent.
            ValueError: the tensors do not fit the metadata or the tap, or the header is longer than a page.
        """
        if self._pinned is None:
            raise ValueError("this publisher has no pinned files")
        self._check(metadata, {name: (place.dtype, place.shape) for name, place in landing.places.items()})
        head = encode_head(landing.places, metadata.to_map(), landing.file.nbytes)
        name = dump_name(number)
        try:
            if self._lock is None:
                raise OSError("the publisher is closed")
            with self._mutex:
                self._write_late()
            self._fill(landing.file.descriptor, [head])
            self._pinned.publish(landing.file, number, self._directory / name)
        except OSError as error:
            raise PublishError(metadata.rid, f"{self._directory}: {error.strerror or error}") from error
        return name

    def tend(self) -> None:
        """Look after the pinned files: take back what was handed back, and make one that was wanted, where there is room."""
        if self._pinned is None:
            return
        self._pinned.take_back()
        nbytes = self._pinned.next_wanted()
        if nbytes is None:
            return
        with self._mutex:
            if not self._has_spare_room(nbytes):
                return
            self._in_flight += nbytes
        try:
            self._pinned.make(self._take_number(), nbytes)
        finally:
            with self._mutex:
                self._in_flight -= nbytes

    def close(self) -> None:
        """As for any publisher; first the pinned files are let go of."""
        if self._pinned is not None:
            self._pinned.close()
        super().close()

    def _has_spare_room(self, nbytes: int) -> bool:
        """Whether `nbytes` are within the budget, once free files that are not pinned were removed for them."""
        if self._excess(nbytes) > 0:
            self._held, self._error_records, _ = self._scan()
        if self._excess(nbytes) > 0 and self._free.remove(self._excess(nbytes)):
            self._held, self._error_records, _ = self._scan()
        return self._excess(nbytes) <= 0
