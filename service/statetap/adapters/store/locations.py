"""Where a store is: today a local path, so a URL is refused by name rather than taken for a directory."""

from __future__ import annotations

from pathlib import Path

from statetap.ports import StoreError


def local_path(location: str) -> Path:
    """The directory of a store.

    Raises:
        StoreError: `location` is a URL or a relative path.
    """
    if "://" in location:
        raise StoreError(f"{location} is a URL; stores are local directories: give an absolute path")
    path = Path(location)
    if not path.is_absolute():
        raise StoreError(f"{location!r} is a relative path; give an absolute one")
    return path
