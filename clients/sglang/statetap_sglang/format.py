"""The dump format, version 1: names, metadata and the views that cross the boundary.

A dump is one safetensors file: the rows of one sample in one forward pass. This module says what is in it; `publisher`
writes it, `reader` maps it, `plain` knows the dumps of hand-patched servers. Nothing here imports torch or SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

FORMAT_VERSION = 1
PAGE_BYTES = 4096

BEACON_NAME = "tap.json"
REFUSAL_NAME = "refused.json"
DUMP_PREFIX = "req_"
DUMP_SUFFIX = ".safetensors"
ERROR_SUFFIX = ".error.json"
PADDING_PREFIX = "_pad_"

TOKEN_IDS = "token_ids"  # noqa: S105 (tokens of text)
AUX_HIDDEN_STATES = "aux_hidden_states"
LAST_HIDDEN_STATES = "last_hidden_states"
LAST_HIDDEN_STATES_PRENORM = "last_hidden_states_prenorm"
ROW_CHECKSUMS = "row_checksums"
HIDDEN_TENSORS = (AUX_HIDDEN_STATES, LAST_HIDDEN_STATES, LAST_HIDDEN_STATES_PRENORM)

# safetensors' dtype names, and the bytes of one element.
ITEM_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8}
MODEL_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

MAX_ROWS = 1 << 31
MAX_COUNTER = 1 << 63

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_LENGTHS = ("prefix_len", "extend_len", "prompt_len")
_COUNTERS = ("retraction_count", "forward_pass", "forward_start_ns", "forward_end_ns")


class DumpFormatError(ValueError):
    """A file that claims to be a dump and is not one. `path` names it, `reason` says what is wrong."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TensorView:
    """A C-contiguous tensor as bytes: `dtype` is safetensors' name for it, rows come first.

    It is both what a publisher takes and what a reader gives; a reader's `data` is a view of the mapped file, read-only.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class DumpMetadata:
    """What a dump says of itself, beside its tensors. Rows are tokens; times are monotonic nanoseconds, 0 if unknown.

    The dump holds rows `[prefix_len, prefix_len + extend_len)` of the request `rid`'s prompt. `retraction_count` tells the
    generations of a retracted request apart: one generation must tile. `prompt_len` is None where the publisher did not know it.
    """

    boot_id: str
    rid: str
    prefix_len: int
    extend_len: int
    prompt_len: int | None = None
    retraction_count: int = 0
    forward_pass: int = 0
    forward_start_ns: int = 0
    forward_end_ns: int = 0
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {self.format_version}, this is version {FORMAT_VERSION}")
        for name in ("boot_id", "rid"):
            check_text(name, getattr(self, name))
        for names, limit in ((_LENGTHS, MAX_ROWS), (_COUNTERS, MAX_COUNTER)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not 0 <= value < limit:
                    raise ValueError(f"{name} is {value}, it must be at least 0 and below {limit}")
        if self.extend_len < 1:
            raise ValueError("extend_len is 0, a dump has at least one row")

    def to_map(self) -> dict[str, str]:
        """As safetensors' metadata map; `prompt_len` is absent where it is not known."""
        names = ("format_version", "boot_id", "rid", *_LENGTHS, *_COUNTERS)
        values = {name: getattr(self, name) for name in names}
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_map(cls, values: Mapping[str, str]) -> DumpMetadata:
        """The inverse of `to_map`. Unknown keys are ignored (a newer minor writer).

        Raises:
            ValueError: a key is missing, or a value is not what it must be.
        """
        numbers: dict[str, int] = {}
        for name in ("format_version", *_LENGTHS, *_COUNTERS):
            text = values.get(name)
            if text is None and name == "prompt_len":
                continue
            if text is None or not _DECIMAL.fullmatch(text):
                raise ValueError(f"metadata {name} is {text!r}, it must be a decimal number")
            numbers[name] = int(text)
        prompt_len = numbers.pop("prompt_len", None)
        return cls(boot_id=values.get("boot_id", ""), rid=values.get("rid", ""), prompt_len=prompt_len, **numbers)


def check_text(name: str, value: str) -> None:
    """ValueError unless `value` is a non-empty string that UTF-8 can carry."""
    if not value:
        raise ValueError(f"{name} is missing or empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from error


def check_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]], rows: int) -> None:
    """ValueError unless name → (dtype, shape) are a dump's tensors: all of `rows` rows, one dtype and one hidden size.

    Paddings are not among them. Row checksums may be missing.
    """
    unknown = tensors.keys() - {TOKEN_IDS, *HIDDEN_TENSORS, ROW_CHECKSUMS}
    if unknown:
        raise ValueError(f"unknown tensors {sorted(unknown)}")
    if tensors.get(TOKEN_IDS) != ("I32", (rows,)):
        raise ValueError(f"token_ids is {tensors.get(TOKEN_IDS)}, it must be I32 with shape ({rows},)")
    if ROW_CHECKSUMS in tensors and tensors[ROW_CHECKSUMS] != ("I64", (rows,)):
        raise ValueError(f"row_checksums is {tensors[ROW_CHECKSUMS]}, it must be I64 with shape ({rows},)")
    hidden = {name: tensors[name] for name in HIDDEN_TENSORS if name in tensors}
    if not hidden:
        raise ValueError("no hidden states")
    for name, (dtype, shape) in hidden.items():
        if dtype not in MODEL_DTYPES.values():
            raise ValueError(f"{name} has dtype {dtype}, hidden states have {', '.join(MODEL_DTYPES.values())}")
        if len(shape) != (3 if name == AUX_HIDDEN_STATES else 2) or shape[0] != rows or 0 in shape:
            form = "(rows, layers, hidden)" if name == AUX_HIDDEN_STATES else "(rows, hidden)"
            raise ValueError(f"{name} has shape {shape}, it must be {form} with {rows} rows")
    if len({(dtype, shape[-1]) for dtype, shape in hidden.values()}) > 1:
        raise ValueError(f"hidden states of different dtypes or sizes: {hidden}")


_DUMP_NAME = re.compile(re.escape(DUMP_PREFIX) + r"(0|[1-9][0-9]{0,17})" + re.escape(DUMP_SUFFIX), re.ASCII)
_ERROR_NAME = re.compile(re.escape(DUMP_PREFIX) + r"(0|[1-9][0-9]{0,17})" + re.escape(ERROR_SUFFIX), re.ASCII)


def stem(number: int) -> str:
    """`req_<N>`, which stands for a dump before it is known whether it will be published or lost."""
    return f"{DUMP_PREFIX}{number}"


def dump_name(number: int) -> str:
    return stem(number) + DUMP_SUFFIX


def error_name(number: int) -> str:
    return stem(number) + ERROR_SUFFIX


def dump_number(name: str) -> int | None:
    """N of `req_<N>.safetensors`, None for any other name."""
    found = _DUMP_NAME.fullmatch(name)
    return int(found[1]) if found else None


def error_number(name: str) -> int | None:
    """N of `req_<N>.error.json`, None for any other name."""
    found = _ERROR_NAME.fullmatch(name)
    return int(found[1]) if found else None
