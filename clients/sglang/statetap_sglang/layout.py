"""How one sample's tensors of one pass lie in memory: in the ring each at a cache line, in a dump file each at a page.

In a dump file that is written in place the first page is the header's (`header.encode_head`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from statetap_sglang.filesystem import round_to_pages
from statetap_sglang.format import (
    AUX_HIDDEN_STATES,
    ITEM_BYTES,
    LAST_HIDDEN_STATES,
    LAST_HIDDEN_STATES_PRENORM,
    MODEL_DTYPES,
    PAGE_BYTES,
    ROW_CHECKSUMS,
    TOKEN_IDS,
)

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor: safetensors' dtype, shape, and where it starts in the span or the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLayout:
    """What a tap captures of each row: `aux_layers` layers and the final states, `hidden_size` wide, in the model's dtype."""

    aux_layers: int
    final: str
    hidden_size: int
    dtype: str

    def places(self, rows: int) -> dict[str, Place]:
        """Where the tensors of `rows` rows lie in the ring, by name, in the order of their offsets."""
        return self._lay_out(rows, 0, _ALIGNMENT)

    def span_bytes(self, rows: int) -> int:
        """What `rows` rows take in the ring."""
        return sum(-(-place.nbytes // _ALIGNMENT) * _ALIGNMENT for place in self.places(rows).values())

    def file_places(self, rows: int) -> dict[str, Place]:
        """Where they lie in a dump file that is written in place."""
        return self._lay_out(rows, PAGE_BYTES, PAGE_BYTES)

    def file_bytes(self, rows: int) -> int:
        """What such a file has at least: whole pages."""
        *_, last = self.file_places(rows).values()
        return round_to_pages(last.offset + last.nbytes)

    def _lay_out(self, rows: int, start: int, alignment: int) -> dict[str, Place]:
        width, dtype = self.hidden_size, MODEL_DTYPES[self.dtype]
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {TOKEN_IDS: ("I32", (rows,))}
        if self.aux_layers:
            wanted[AUX_HIDDEN_STATES] = (dtype, (rows, self.aux_layers, width))
        if self.final in ("post_norm", "both"):
            wanted[LAST_HIDDEN_STATES] = (dtype, (rows, width))
        if self.final in ("pre_norm", "both"):
            wanted[LAST_HIDDEN_STATES_PRENORM] = (dtype, (rows, width))
        wanted[ROW_CHECKSUMS] = ("I64", (rows,))
        places = {}
        offset = start
        for name, (kind, shape) in wanted.items():
            places[name] = Place(kind, shape, offset)
            offset += -(-places[name].nbytes // alignment) * alignment
        return places
