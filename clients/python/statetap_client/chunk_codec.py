"""The codec of compressed chunks, for whoever writes shard objects by hand: what `layout.compact_document` tells readers.

A thread other than the main one compresses by itself alone, and the same chunk to the same bytes; both let other threads run.
"""

from __future__ import annotations

import numpy as np
from numcodecs.blosc import Blosc
from numpy.typing import NDArray

from statetap_client import layout

_BLOSC = Blosc(layout.BLOSC_NAME, layout.BLOSC_LEVEL, Blosc.SHUFFLE, layout.BLOSC_BLOCK_BYTES)


def encode(chunk: NDArray[np.uint8], item_bytes: int) -> bytes:
    """A whole chunk's bytes compressed, as items of so many bytes: blosc shuffles by the size that it finds in the array."""
    encoded: bytes = _BLOSC.encode(chunk.view(f"u{item_bytes}"))
    return encoded


def decode_into(encoded: bytes, chunk: NDArray[np.uint8]) -> None:
    """Fill `chunk` with what was compressed.

    Raises:
        RuntimeError: this is no compressed chunk.
    """
    _BLOSC.decode(encoded, out=chunk)
