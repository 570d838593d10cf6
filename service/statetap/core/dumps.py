"""What core knows of a dump: facts, never bytes of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from statetap.core.spec import CaptureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFacts:
    """A published dump. `dump_id` is unique per worker, `sequence` its counter, `nbytes` the bytes that it holds there.

    A plugin dump has a `rid` and covers rows `[prefix_len, prefix_len + rows)`; `token_ids` are its rows' ids as little-endian
    int32 bytes. A plain dump has neither. `tensors` maps each hidden tensor's name to (dtype, shape), dtype as the model's.
    `capture` and `model_fingerprint` are what its tap says of itself: rows of other layers may have the same shape.
    `name` is what its worker's answers call it (`<boot_id>-<dp_rank>/req_<N>`); a plain dump has none. `forward_start_ns` and
    `forward_end_ns` are when its pass ran, by its host's monotonic clock; 0 where nobody says.
    """

    dump_id: str
    sequence: int
    rows: int
    nbytes: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    capture: CaptureSpec
    model_fingerprint: str
    rid: str | None = None
    prefix_len: int = 0
    prompt_len: int | None = None
    retraction_count: int = 0
    token_ids: bytes | None = None
    name: str | None = None
    forward_start_ns: int = 0
    forward_end_ns: int = 0
