"""The objects of a store in a local directory: replaced in one step, and synced, their directories too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from statetap.adapters.store.durable_files import as_store_error, fsync_directory, make_directories, replace_file, sync_object


class LocalObjects:
    """Objects are files below `root`."""

    largest_bytes = None

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    @contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise as_store_error(e, f"{doing} {self}") from e

    def is_vacant(self) -> bool:
        root = self._root
        return not root.exists() or (root.is_dir() and all(path.name.startswith(".") for path in root.iterdir()))

    def exists(self, key: str) -> bool:
        return (self._root / key).exists()

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def replace(self, key: str, data: bytes) -> None:
        path = self._root / key
        make_directories(path.parent)
        replace_file(path, data)
        if path.parent != self._root:
            # Whoever made the directory may have been killed before it was synced.
            fsync_directory(path.parent.parent)

    def settle(self, key: str) -> None:
        sync_object(self._root / key)

    def zarr_store(self) -> Path:
        return self._root

    def free_bytes(self) -> int:
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        space = os.statvfs(existing)
        return space.f_bavail * space.f_frsize
