"""What is captured, of which model, and how its rows are stored. Layer ids are in Statetap's convention (contract §1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

AUX_HIDDEN_STATES = "aux_hidden_states"
LAST_HIDDEN_STATES = "last_hidden_states"
LAST_HIDDEN_STATES_PRENORM = "last_hidden_states_prenorm"


class Final(StrEnum):
    """Which forms of the final state are captured: after the model's final norm, before it, both, or neither."""

    POST_NORM = "post_norm"
    PRE_NORM = "pre_norm"
    BOTH = "both"
    NONE = "none"


class Identity(StrEnum):
    """How a dump is matched to its sample: by request id, row range and token ids, or by row count alone (strict mode)."""

    TOKENS = "tokens"
    COUNT = "count"


class Compression(StrEnum):
    """How the hidden arrays' chunks are stored: as they are, or each compressed by zstd."""

    NONE = "none"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class HiddenArray:
    """One hidden array: of a dump's rows, of a shard, of the store. `row_shape` is `(K, H)` or `(H,)`."""

    name: str
    row_shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        return prod(self.row_shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model as its workers describe it. `dtype` is `bfloat16`, `float16` or `float32`; sizes in elements."""

    model_path: str
    model_fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Which layers and which final states. `aux_layer_ids` are ascending and may be empty.

    Raises:
        ValueError: nothing to capture, or ids that are negative, repeated or out of order.
    """

    aux_layer_ids: tuple[int, ...]
    final: Final

    def __post_init__(self) -> None:
        if not self.aux_layer_ids and self.final is Final.NONE:
            raise ValueError("a capture spec must name a layer or a final state")
        if any(i < 0 for i in self.aux_layer_ids) or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise ValueError(f"aux_layer_ids must be ascending, distinct and at least 0, not {list(self.aux_layer_ids)}")

    def hidden_arrays(self, model: ModelFacts) -> tuple[HiddenArray, ...]:
        """The arrays that this spec fills, in the store's order (contract §3)."""
        h, dtype = model.hidden_size, model.dtype
        arrays = []
        if self.aux_layer_ids:
            arrays.append(HiddenArray(AUX_HIDDEN_STATES, (len(self.aux_layer_ids), h), dtype))
        if self.final in (Final.POST_NORM, Final.BOTH):
            arrays.append(HiddenArray(LAST_HIDDEN_STATES, (h,), dtype))
        if self.final in (Final.PRE_NORM, Final.BOTH):
            arrays.append(HiddenArray(LAST_HIDDEN_STATES_PRENORM, (h,), dtype))
        return tuple(arrays)

    def row_bytes(self, model: ModelFacts) -> int:
        """Bytes of one token's row over all hidden arrays."""
        return sum(array.row_bytes for array in self.hidden_arrays(model))


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """The three auxiliary layers that EAGLE-3 trains on: 1, n//2-1, n-4 (contract §1); fewer where the model is too shallow."""
    return tuple(sorted({layer for layer in (1, num_layers // 2 - 1, num_layers - 4) if 0 <= layer < num_layers}))


def preset(name: str, num_layers: int) -> CaptureSpec:
    """The capture spec of a preset: `eagle3`, `speculators`, `all-trainers` or `mtp`.

    `dflash` names no layers of its own: its ids come with its draft model, so a job that wants it lists them.

    Raises:
        ValueError: unknown preset.
    """
    layers = eagle3_layers(num_layers)
    presets = {
        "eagle3": CaptureSpec(layers, Final.POST_NORM),
        "speculators": CaptureSpec(layers, Final.PRE_NORM),
        "all-trainers": CaptureSpec(layers, Final.BOTH),
        "mtp": CaptureSpec((), Final.POST_NORM),
    }
    if name not in presets:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(presets)}")
    return presets[name]
