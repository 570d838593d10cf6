"""JSON from files that others wrote: one object, no repeated keys, no NaN, bounded depth, and one kind of error."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from statetap_sglang.format import DumpFormatError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Made once: to make one takes longer than to read a dump's header by it.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def load_object(path: object, raw: bytes) -> dict[str, Any]:
    """Parse `raw`, which the caller has bounded in size.

    Raises:
        DumpFormatError: not UTF-8, not JSON, nested too deep, not an object, or an object with a repeated key.
    """
    try:
        value = _DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:
        raise DumpFormatError(path, f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DumpFormatError(path, f"not a JSON object but a {type(value).__name__}")
    return value
