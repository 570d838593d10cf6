"""Cursors of paged lists: opaque to who holds them, the last key of a page to who gave them."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import TypeVar

from statetap.ports import BadCursor, Page

T = TypeVar("T")
R = TypeVar("R")


def encode_cursor(listing: str, key: int) -> str:
    return urlsafe_b64encode(f"{listing}:{key}".encode()).decode().rstrip("=")


def decode_cursor(listing: str, cursor: str) -> int:
    """The key in a cursor of the list `listing`. BadCursor: it is from another list, or from nowhere."""
    try:
        text = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4)).decode("ascii")
    except (UnicodeError, binascii.Error):
        text = ""
    kind, _, digits = text.partition(":")
    # The way back must give the same cursor: then digits are plain digits, and a key fits what was once a column.
    if kind != listing or not digits.isdigit() or len(digits) > 18 or encode_cursor(listing, int(digits)) != cursor:
        raise BadCursor(f"{cursor!r} is not a cursor of the list of {listing}; ask without a cursor for the first page")
    return int(digits)


def page(listing: str, rows: Sequence[R], limit: int, record: Callable[[R], T], key: Callable[[R], int]) -> Page[T]:
    """The page of the first `limit` of `rows`, which were asked for with `limit + 1` to see whether more follow."""
    shown = rows[:limit]
    cursor = encode_cursor(listing, key(shown[-1])) if len(rows) > limit else None
    return Page([record(row) for row in shown], cursor)
