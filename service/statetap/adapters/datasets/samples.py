"""One line of a dataset, read and checked as far as that goes without a tokenizer (contract §4).

A key whose value is null counts as absent: exports of tables write all columns in every row. Unknown keys are kept out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.messages import Message, from_openai, from_sharegpt
from statetap.ports import DatasetRefused

FORMS = ("input_ids", "text", "messages", "conversations")
ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Tokens:
    """`mask` is None where every token is trained on."""

    ids: list[int]
    mask: list[int] | None


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """`field` is the key that the chat came in."""

    messages: list[Message]
    field: str


@dataclass(frozen=True, slots=True)
class Sample:
    id: str
    line: int
    content: Tokens | Text | Chat


def read_sample(text: bytes, line: int, limits: IntakeLimits) -> Sample:
    """Read one line (not a blank one).

    Raises:
        DatasetRefused: with the line and, where one is at fault, the field.
    """
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DatasetRefused(f"not JSON ({error}); every line must be one JSON object in UTF-8", line=line) from error
    if not isinstance(record, dict):
        raise DatasetRefused(f"a JSON {_kind(record)}, not an object; every line must be one JSON object", line=line)
    given = [form for form in FORMS if record.get(form) is not None]
    if len(given) != 1:
        found = "none of" if not given else f"{' and '.join(given)}, which are too many of"
        raise DatasetRefused(f"the sample has {found} {', '.join(FORMS)}; give exactly one", line=line)
    if record.get("loss_mask") is not None and given != ["input_ids"]:
        raise DatasetRefused(f"a loss_mask goes with input_ids, not with {given[0]}; leave it out", line=line, field="loss_mask")
    return Sample(_read_id(record.get("id"), line), line, _read_content(record, given[0], line, limits))


def _read_id(value: Any, line: int) -> str:
    if value is None:
        return str(line)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= ID_CHARS:
        raise DatasetRefused(
            f"an id is text of 1 to {ID_CHARS} characters or an integer, and may be left out", line=line, field="id"
        )
    return value


def _read_content(record: dict[str, Any], form: str, line: int, limits: IntakeLimits) -> Tokens | Text | Chat:
    value = record[form]
    match form:
        case "input_ids":
            return _read_tokens(value, record.get("loss_mask"), line)
        case "text":
            if not isinstance(value, str):
                raise DatasetRefused(f"must be text, not {_kind(value)}", line=line, field="text")
            return Text(value)
        case "messages":
            return Chat(from_openai(value, limits.messages, line), form)
        case _:
            return Chat(from_sharegpt(value, limits.messages, line), form)


def _read_tokens(ids: Any, mask: Any, line: int) -> Tokens:
    _check_integers(ids, "input_ids", line)
    if not ids:
        raise DatasetRefused("the sequence is empty; leave the sample out", line=line, field="input_ids")
    if mask is None:
        return Tokens(ids, None)
    _check_integers(mask, "loss_mask", line)
    if len(mask) != len(ids):
        raise DatasetRefused(f"{len(mask)} values for {len(ids)} input_ids; give one for each", line=line, field="loss_mask")
    if not set(mask) <= {0, 1}:
        index, value = next((index, value) for index, value in enumerate(mask) if value not in (0, 1))
        raise DatasetRefused(f"value {value} at position {index}; a mask is made of 0 and 1", line=line, field="loss_mask")
    return Tokens(ids, mask)


def _check_integers(values: Any, field: str, line: int) -> None:
    if not isinstance(values, list):
        raise DatasetRefused(f"must be a list of integers, not {_kind(values)}", line=line, field=field)
    # `bool` is a subclass of `int`, and 1.0 == 1: only the exact type tells them apart.
    if set(map(type, values)) - {int}:
        index, value = next((index, value) for index, value in enumerate(values) if type(value) is not int)
        raise DatasetRefused(f"{_kind(value)} at position {index}; integers only", line=line, field=field)


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", float: "number with a fraction", str: "string", list: "list", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")
