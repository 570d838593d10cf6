"""Datasets on their way out: whatever holds the samples becomes NDJSON in chunks, compressed where that is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

CHUNK_BYTES = 1 << 18
GZIP_FORMAT = 31  # zlib's window bits for a gzip header and trailer
GZIP_LEVEL = 1  # the wire is the bottleneck only where it is slow, and there level 1 does most of the work

Samples = str | Path | Iterable[Mapping[str, Any] | bytes]
"""The path of a file of NDJSON (`.gz` if it is compressed), or samples: mappings (fields in contract §4), or lines of JSON."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A body: NDJSON, gzipped or not. It can be read once."""

    chunks: Iterator[bytes]
    gzipped: bool


def upload(samples: Samples, *, gzip: bool) -> Upload:
    """A file that ends in `.gz` is sent as it is; everything else is compressed if `gzip`."""
    if isinstance(samples, str | Path):
        samples = Path(samples)
        if samples.suffix == ".gz":
            return Upload(_file_chunks(samples), gzipped=True)
        plain = _file_chunks(samples)
    else:
        plain = _line_chunks(samples)
    return Upload(_compressed(plain) if gzip else plain, gzipped=gzip)


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _line_chunks(samples: Iterable[Mapping[str, Any] | bytes]) -> Iterator[bytes]:
    lines = bytearray()
    for sample in samples:
        line = sample if isinstance(sample, bytes) else orjson.dumps(sample, option=orjson.OPT_SERIALIZE_NUMPY)
        lines += line if line.endswith(b"\n") else line + b"\n"
        if len(lines) >= CHUNK_BYTES:
            yield bytes(lines)
            lines.clear()
    if lines:
        yield bytes(lines)


def _compressed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_FORMAT)
    for chunk in chunks:
        if compressed := compressor.compress(chunk):
            yield compressed
    yield compressor.flush()
