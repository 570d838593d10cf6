"""The beacon `tap.json`: what a tap says of itself, so that a wrong set-up is refused before the first request."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from statetap_sglang.filesystem import read_small
from statetap_sglang.format import BEACON_NAME, FORMAT_VERSION, MAX_COUNTER, MAX_ROWS, MODEL_DTYPES, DumpFormatError, check_text
from statetap_sglang.strict_json import load_object
from statetap_sglang.tap import UNPUBLISHED_BEACON, check_name

FINALS = ("post_norm", "pre_norm", "both", "none")
MAX_BEACON_BYTES = 1 << 16

_TEXTS = ("plugin_version", "sglang_version", "model_path", "model_fingerprint")
_COUNTS = ("num_layers", "hidden_size", "vocab_size", "tp_size", "dp_size", "context_length")
# What older publishers do not say.
_OPTIONAL = frozenset({"recycle_from_bytes"})
_NUMBERS = ("format_version", "dp_rank", "pid", "budget_bytes", *_COUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beacon:
    """One tap: one publishing process of a worker. Contract §2 lists the fields; the file holds exactly these keys.

    Released dumps of `recycle_from_bytes` or more are to be handed back (`free_files`); all are removed where it is None.

    `aux_layer_ids` are in Statetap's convention (the residual stream after 0-based layer i), ascending. `dtype` is
    `bfloat16`, `float16` or `float32`. `final` is `post_norm`, `pre_norm`, `both` or `none`. `chunked_prefill_size` is in
    tokens, None where prompts are never chunked; `context_length` in tokens.

    Raises:
        ValueError: a field is of the wrong type or impossible.
    """

    boot_id: str
    dp_rank: int
    plugin_version: str
    sglang_version: str
    model_path: str
    model_fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    final: str
    dtype: str
    tp_size: int
    dp_size: int
    pid: int
    budget_bytes: int
    radix_cache: bool
    chunked_prefill_size: int | None
    context_length: int
    recycle_from_bytes: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("boot_id", "final", "dtype", *_TEXTS):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is not a string")  # noqa: TRY004 (one kind of error for a wrong field)
        for name in _TEXTS:
            check_text(name, getattr(self, name))
        for name in _NUMBERS:
            _check_number(name, getattr(self, name), least=1 if name in _COUNTS else 0)
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {self.format_version}, this is version {FORMAT_VERSION}")
        if type(self.radix_cache) is not bool:
            raise ValueError("radix_cache is neither true nor false")
        if self.chunked_prefill_size is not None:
            _check_number("chunked_prefill_size", self.chunked_prefill_size, least=1)
        if self.recycle_from_bytes is not None:
            _check_number("recycle_from_bytes", self.recycle_from_bytes, least=0)
        check_name("boot_id", self.boot_id)
        if self.final not in FINALS:
            raise ValueError(f"final is {self.final!r}, it must be one of {', '.join(FINALS)}")
        if self.dtype not in MODEL_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, it must be one of {', '.join(MODEL_DTYPES)}")
        self._check_layers()

    def _check_layers(self) -> None:
        ids = self.aux_layer_ids
        if not isinstance(ids, tuple):
            raise ValueError("aux_layer_ids is not a sequence of layer ids")  # noqa: TRY004 (see above)
        for layer in ids:
            _check_number("aux_layer_ids", layer, least=0)
        if list(ids) != sorted(set(ids)) or (ids and ids[-1] >= self.num_layers):
            raise ValueError(f"aux_layer_ids is {list(ids)}, it must be ascending, distinct and below {self.num_layers}")
        if not ids and self.final == "none":
            raise ValueError("neither aux_layer_ids nor final names anything to capture")

    def write(self, directory: Path) -> None:
        """Write `tap.json` under a dot-name and rename it over an older one."""
        unpublished = directory / UNPUBLISHED_BEACON
        unpublished.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        unpublished.replace(directory / BEACON_NAME)

    @classmethod
    def read(cls, directory: Path) -> Beacon:
        """Read and validate a beacon. Unknown keys are ignored (a newer minor writer).

        Raises:
            FileNotFoundError: there is none (yet).
            DumpFormatError: it is not a beacon, or of another format version.
        """
        path = directory / BEACON_NAME
        found = load_object(path, read_small(path, MAX_BEACON_BYTES))
        names = [field.name for field in fields(cls) if field.name in found or field.name not in _OPTIONAL]
        missing = [name for name in names if name not in found]
        if missing:
            raise DumpFormatError(path, f"lacks {', '.join(missing)}")
        values: dict[str, Any] = {name: found[name] for name in names}
        if isinstance(values["aux_layer_ids"], list):
            values["aux_layer_ids"] = tuple(values["aux_layer_ids"])
        try:
            return cls(**values)
        except ValueError as error:
            raise DumpFormatError(path, str(error)) from error


def _check_number(name: str, value: object, *, least: int) -> None:
    limit = MAX_COUNTER if name.endswith("_bytes") else MAX_ROWS
    # `type`, not `isinstance`: True is an int.
    if type(value) is not int or not least <= value < limit:
        raise ValueError(f"{name} is {value!r}, it must be a whole number of at least {least}")
