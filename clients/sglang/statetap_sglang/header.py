"""Safetensors headers, written and read by hand: page alignment on the way out, and no trust on the way in.

The format (safetensors' own description): 8 bytes of header length, little-endian; that many bytes of JSON, which may end in
spaces; then the tensors' bytes, without holes. `data_offsets` count from the end of the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from statetap_sglang.filesystem import round_to_pages
from statetap_sglang.format import PADDING_PREFIX, PAGE_BYTES, DumpFormatError, DumpMetadata, TensorView
from statetap_sglang.layout import Place
from statetap_sglang.strict_json import load_object

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 256
MAX_RANK = 8
MAX_DIMENSION = 1 << 48
# A request id that takes no more leaves room in one page for all else that a dump's header may say.
_MAX_ONE_PAGE_RID = 512

# Plain dumps may hold tensors that nobody asked for, so every dtype of safetensors that has whole bytes is known here.
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor in a file: bytes `[start, end)` after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def encode(
    tensors: Mapping[str, TensorView], metadata: Mapping[str, str] | None = None, *, page_aligned: bool
) -> list[bytes | memoryview]:
    """The pieces of a safetensors file in order: header, then tensors, with paddings between them where `page_aligned`.

    Raises:
        ValueError: a tensor's data is not as long as its shape says, or the header is longer than a reader would take.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    pieces: list[bytes | memoryview] = []
    offset = 0

    def add(name: str, dtype: str, shape: Iterable[int], data: bytes | memoryview) -> None:
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        pieces.append(data)
        offset += len(data)

    for name, tensor in tensors.items():
        if tensor.data.nbytes != tensor.nbytes or not tensor.data.c_contiguous:
            raise ValueError(f"{name}: {tensor.data.nbytes} bytes given, {tensor.dtype} {tensor.shape} is {tensor.nbytes}")
        gap = round_to_pages(offset) - offset
        if page_aligned and gap:
            add(f"{PADDING_PREFIX}{len(pieces)}", "U8", (gap,), bytes(gap))
        add(name, tensor.dtype, tensor.shape, tensor.data.cast("B"))

    text = json.dumps(header, separators=(",", ":")).encode()
    length = LENGTH_BYTES + len(text)
    length = round_to_pages(length) if page_aligned else -(-length // 8) * 8
    if length - LENGTH_BYTES > MAX_HEADER_BYTES:
        raise ValueError(
            f"a header of {length - LENGTH_BYTES} bytes, at most {MAX_HEADER_BYTES} are read; is the request id that long?"
        )
    return [struct.pack("<Q", length - LENGTH_BYTES) + text.ljust(length - LENGTH_BYTES), *pieces]


def fits_one_page(metadata: DumpMetadata) -> bool:
    """Whether `encode_head` will take this dump's metadata, whatever its numbers come to be."""
    return len(json.dumps(metadata.rid)) <= _MAX_ONE_PAGE_RID


def encode_head(places: Mapping[str, Place], metadata: Mapping[str, str], file_bytes: int) -> bytes:
    """The first page of a file of `file_bytes` in which the tensors lie already, at their places. The rest is paddings.

    Raises:
        ValueError: the header is longer than a page.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = PAGE_BYTES

    def add(name: str, dtype: str, shape: Iterable[int], start: int, stop: int) -> None:
        offsets = [start - PAGE_BYTES, stop - PAGE_BYTES]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}

    def pad(start: int, stop: int) -> None:
        if start < stop:
            add(f"{PADDING_PREFIX}{len(header)}", "U8", (stop - start,), start, stop)

    for name, place in places.items():
        pad(end, place.offset)
        end = place.offset + place.nbytes
        add(name, place.dtype, place.shape, place.offset, end)
    pad(end, file_bytes)

    text = json.dumps(header, separators=(",", ":")).encode()
    length = PAGE_BYTES - LENGTH_BYTES
    if len(text) > length:
        raise ValueError(f"a header of {len(text)} bytes, {length} are kept free for it; is the request id that long?")
    return struct.pack("<Q", length) + text.ljust(length)


def header_length(path: object, prefix: bytes, file_bytes: int) -> int:
    """The header's bytes, from the file's first 8. DumpFormatError: the file cannot hold it, or it is over 1 MiB."""
    if len(prefix) < LENGTH_BYTES:
        raise DumpFormatError(path, f"{file_bytes} bytes, too short for a header")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise DumpFormatError(path, f"claims a header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
    if LENGTH_BYTES + length > file_bytes:
        raise DumpFormatError(path, f"claims a header of {length} bytes in a file of {file_bytes}")
    return length


def decode(path: object, header: bytes, data_bytes: int) -> tuple[dict[str, str], dict[str, TensorSpan]]:
    """The metadata map and the tensors, which cover the `data_bytes` after the header exactly once.

    Raises:
        DumpFormatError: anything else.
    """
    entries = load_object(path, header.rstrip(b" "))
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DumpFormatError(path, "__metadata__ is not a map of strings")
    if len(entries) > MAX_TENSORS:
        raise DumpFormatError(path, f"{len(entries)} tensors, at most {MAX_TENSORS} are read")
    spans = {name: _span(path, name, entry) for name, entry in entries.items()}
    offset = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
        if span.start != offset:
            raise DumpFormatError(path, f"tensor {name!r} starts at {span.start}, the one before it ends at {offset}")
        offset = span.end
    if offset != data_bytes:
        raise DumpFormatError(path, f"tensors end at {offset}, the file has {data_bytes} bytes of them")
    return metadata, spans


def _span(path: object, name: str, entry: object) -> TensorSpan:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DumpFormatError(path, f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise DumpFormatError(path, f"tensor {name!r} has an unknown dtype")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise DumpFormatError(path, f"tensor {name!r} has an impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise DumpFormatError(path, f"tensor {name!r} has impossible data_offsets")
    start, end = offsets
    nbytes = prod(shape) * _ITEM_BYTES[dtype]
    if end - start != nbytes:
        raise DumpFormatError(path, f"tensor {name!r} has {end - start} bytes, {dtype} {shape} is {nbytes}")
    return TensorSpan(dtype, tuple(shape), start, end)


def _are_sizes(values: object) -> bool:
    # `type`, not `isinstance`: JSON's true is a Python int.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_DIMENSION for value in values)
