"""Where a store is: a local directory, or a URL of an object store."""

from __future__ import annotations

from pathlib import Path

from statetap.ports import StoreError


def is_remote(location: str) -> bool:
    """Whether a location is a URL."""
    return "://" in location


def local_path(location: str) -> Path:
    """The directory of a local store.

    Raises:
        StoreError: `location` is a URL or a relative path.
    """
    if is_remote(location):
        raise StoreError(f"{location} is a URL, and no local directory: give an absolute path")
    path = Path(location)
    if not path.is_absolute():
        raise StoreError(f"{location!r} is a relative path; give an absolute one")
    return path
