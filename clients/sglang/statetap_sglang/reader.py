"""Maps dumps: no copy, and nothing is believed before it is checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from statetap_sglang import header
from statetap_sglang.checksum import differing_rows
from statetap_sglang.filesystem import map_readonly, open_regular, round_to_pages
from statetap_sglang.format import PADDING_PREFIX, PAGE_BYTES, DumpFormatError, DumpMetadata, TensorView, check_tensors

_PADDING_NAME = re.compile(re.escape(PADDING_PREFIX) + r"[0-9]{1,9}", re.ASCII)


class MappedFile:
    """A safetensors file, mapped: its metadata map, its tensors' spans, and views of them. No dump yet."""

    def __init__(self, path: Path) -> None:
        descriptor, size = open_regular(path)
        try:
            # The whole of a usual header at once: a second look at the file costs more than the bytes.
            start = os.pread(descriptor, PAGE_BYTES, 0)
            length = header.header_length(path, start, size)
            self.data_start = header.LENGTH_BYTES + length
            text = start[header.LENGTH_BYTES : self.data_start]
            if len(text) < length:
                text = os.pread(descriptor, length, header.LENGTH_BYTES)
            self.metadata, self.spans = header.decode(path, text, size - self.data_start)
            self._bytes = map_readonly(descriptor, size)
        finally:
            os.close(descriptor)
        self.nbytes = round_to_pages(size)

    def tensor(self, name: str) -> TensorView:
        span = self.spans[name]
        return TensorView(span.dtype, span.shape, self._bytes[self.data_start + span.start : self.data_start + span.end])


class MappedDump:
    """An open dump: its metadata, and read-only views of its tensors that stay valid after the file is unlinked, until `close`.

    `tensors` has no paddings; each view starts at a page boundary. `nbytes` is what the file holds on tmpfs: whole pages.
    """

    path: Path
    metadata: DumpMetadata
    tensors: Mapping[str, TensorView]
    nbytes: int

    def __init__(self, path: Path, metadata: DumpMetadata, tensors: Mapping[str, TensorView], nbytes: int) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.nbytes = nbytes

    def verify_rows(self) -> None:
        """Add up every row and compare with the checksum that came with it, where the dump carries them. Reads all pages.

        Raises:
            DumpFormatError: a row is not what its source computed.
        """
        if rows := differing_rows(self.tensors):
            raise DumpFormatError(self.path, f"{len(rows)} rows, the first of them row {rows[0]}, differ from their checksums")

    def close(self) -> None:
        """Drop the mapping. Views still held by somebody keep it alive; they are not cut off under them."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_dump(path: Path) -> MappedDump:
    """Map one published dump.

    Raises:
        FileNotFoundError: it is gone.
        DumpFormatError: not a regular file (symbolic links are never followed), torn, of another format version, or at odds
            with itself.
        OSError: the system refused (descriptors, memory); the dump may be sound.
    """
    file = MappedFile(path)
    try:
        metadata = DumpMetadata.from_map(file.metadata)
        spans = {name: span for name, span in file.spans.items() if not _is_padding(name, span)}
        check_tensors({name: (span.dtype, span.shape) for name, span in spans.items()}, metadata.extend_len)
    except ValueError as error:
        raise DumpFormatError(path, str(error)) from error
    for name, span in spans.items():
        if (file.data_start + span.start) % PAGE_BYTES:
            raise DumpFormatError(path, f"tensor {name!r} does not start at a multiple of {PAGE_BYTES} bytes")
    return MappedDump(path, metadata, {name: file.tensor(name) for name in spans}, file.nbytes)


def _is_padding(name: str, span: header.TensorSpan) -> bool:
    return bool(_PADDING_NAME.fullmatch(name)) and span.dtype == "U8" and len(span.shape) == 1
