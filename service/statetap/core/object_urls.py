"""URLs of stores at object stores: one spelling for each place, so that they can be compared."""

from __future__ import annotations

import re
from typing import Final

_BUCKET: Final = re.compile(r"(s3|gs|az)://[a-z0-9][a-z0-9.-]*", re.ASCII)
# No character that is written in several ways: none that is escaped in a URL, `%` itself above all.
_PART: Final = re.compile(r"[A-Za-z0-9._=-]+", re.ASCII)


def normalise(url: str) -> str:
    """The URL as stores are known by: `scheme://bucket/part/part`, without a slash at its end.

    Raises:
        ValueError: it is not of that form; the message says why.
    """
    if "@" in url:
        # Not repeated: what stands before it may be a secret.
        raise ValueError("a store's URL has an '@' in it; credentials are taken from the service's environment, never from a URL")
    bucket, *parts = _split(url.removesuffix("/"))
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{url!r} does not begin with s3://, gs:// or az:// and a bucket's name alone")
    for part in parts:
        if not _PART.fullmatch(part) or not part.strip("."):
            raise ValueError(f"{url!r} has the part {part!r}; parts are made of letters, digits, '.', '_', '=' and '-'")
    return "/".join([bucket, *parts])


def lies_below(url: str, prefix: str) -> bool:
    """Whether one normalised URL is a place below the other, which is none of its own places."""
    return url.startswith(f"{prefix}/")


def parents(url: str) -> list[str]:
    """The places that a normalised URL lies below, nearest first; the bucket is the last."""
    bucket, *parts = _split(url)
    return ["/".join([bucket, *parts[:count]]) for count in range(len(parts) - 1, -1, -1)]


def _split(url: str) -> list[str]:
    scheme, separator, rest = url.partition("://")
    first, *parts = rest.split("/")
    return [f"{scheme}{separator}{first}", *parts]
