"""Inputs that are nearly right: a valid one, changed in a few places, by bytes and by what the formats are made of."""

from __future__ import annotations

import json
import random
from typing import Any

# Numbers at the edges of what fits somewhere, the syntax of JSON, and beginnings and ends of what else may come.
NUMBERS = b"0 1 -1 255 65536 2147483647 2147483648 9223372036854775807 9223372036854775808 1e999 1.5 NaN Infinity".split()
SYNTAX = b'null true false { } [ ] , : " \\ "" {} [] \\u0000 "\\ud800" "shape":[] "dtype":"BF16" "data_offsets":[0,0]'.split()
KEYS = b'"__metadata__":{} "input_ids":[1] "text":"x" "messages":[] "loss_mask":[0] "id":1 ../../etc/passwd'.split()
BYTES = (b"\n", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1f\x8b\x08", b"PK\x03\x04")
MANY = (b" " * 100, b"[" * 2000, b'{"a":' * 500, b"a" * 5000)
DICTIONARY = (*NUMBERS, *SYNTAX, *KEYS, *BYTES, *MANY)
LENGTHS = (0, 1, 7, 8, 9, 255, 4095, 4096, (1 << 20) - 1, 1 << 20, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES = (
    None,
    True,
    0,
    1,
    -1,
    2**31,
    2**53,
    2**63,
    2**64 - 1,
    1.5,
    "",
    "x",
    "\x00",
    "\u202e",
    "0",
    "9" * 30,
    [],
    [[]],
    {},
    {"a": None},
)
HEADER = 8


def mutated(seed: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A few changes, most often one: the deeper a parser is to be reached, the less may be wrong."""
    data = bytearray(seed)
    if rng.random() < 0.5 and (restructured := _restructured(seed, rng)) is not None:
        return restructured
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 8))):
        _change(data, others, rng)
    return bytes(data)


def _change(data: bytearray, others: list[bytes], rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    # What is at the beginning (headers, the first line) decides most.
    if rng.random() < 0.5:
        start = min(start, rng.randrange(600))
    end = min(len(data), start + rng.choice((0, 1, 1, 2, 4, 8, 64, 1000)))
    match rng.randrange(8):
        case 0 if end > start:
            data[start] ^= 1 << rng.randrange(8)
        case 1:
            data[start:end] = rng.choice(DICTIONARY)
        case 2:
            data[start:start] = rng.choice(DICTIONARY)
        case 3:
            del data[start:end]
        case 4:
            del data[start:]
        case 5:
            piece = bytes(data[start:end])
            data[start:start] = piece * rng.choice((1, 2, 50))
        case 6:
            data[:8] = rng.choice(LENGTHS).to_bytes(8, "little")
        case _:
            other = rng.choice(others)
            at = rng.randrange(len(other) + 1)
            data[start:end] = other[at : at + rng.choice((1, 8, 64, 4000))]


def _restructured(seed: bytes, rng: random.Random) -> bytes | None:
    """The same with values of its JSON changed, so that it stays JSON: a line of a dataset, or a dump's header. None: no JSON."""
    length = int.from_bytes(seed[:HEADER], "little")
    has_header = length <= len(seed) - HEADER
    text = seed[HEADER : HEADER + length] if has_header else seed
    try:
        document = json.loads(text)
    except ValueError:
        return None
    for _ in range(rng.choice((1, 1, 2, 3))):
        document = _with_a_change(document, rng)
    changed = json.dumps(document, separators=(",", ":")).encode()
    if not has_header:
        return changed
    # What follows stays where it was, if that is possible.
    changed = changed.ljust(length)
    return len(changed).to_bytes(HEADER, "little") + changed + seed[HEADER + length :]


def _with_a_change(node: Any, rng: random.Random) -> Any:
    if not isinstance(node, dict | list) or not node or rng.random() < 0.1:
        return rng.choice(VALUES)
    if isinstance(node, list):
        at = rng.randrange(len(node))
        match rng.randrange(4):
            case 0:
                return node * rng.choice((2, 100))
            case 1:
                return node[:at] + node[at + 1 :]
            case _:
                return [*node[:at], _with_a_change(node[at], rng), *node[at + 1 :]]
    key = rng.choice(sorted(node))
    match rng.randrange(5):
        case 0:
            return {name: value for name, value in node.items() if name != key}
        case 1:
            return {**node, str(rng.choice(VALUES)): node[key]}
        case _:
            return {**node, key: _with_a_change(node[key], rng)}
