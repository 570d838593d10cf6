"""A store that is being written, and nobody's yet: under a temporary name, and without the root's metadata until it is whole.

It is `.<name>.partial` beside its place, locked by the process that writes it. What an interrupted one left is swept away by the
next. Everything is synced before it has its name; nothing is replaced.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from statetap_client import layout


class UnpublishedStore:
    """The directory of a store to be, at `path` until `publish` moves it to `target`. Left otherwise, it is gone.

    Raises:
        FileExistsError: something is at `target`, or another process is writing it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self._is_published = False

    def __enter__(self) -> Self:
        self._refuse_existing()
        self.path.mkdir(exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._take()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not self._is_published:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def write(self, key: str, data: bytes) -> None:
        """Write and sync an object of it."""
        path = self.path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, root_document: bytes) -> None:
        """Make it the store at `target`, durably; every object of it must be synced.

        Raises:
            FileExistsError: something has come to be at `target`.
        """
        self.write(layout.METADATA_NAME, root_document)
        for folder, _, _ in os.walk(self.path):
            _sync_directory(Path(folder))
        self._refuse_existing()
        # Rename itself replaces nothing but an empty directory.
        self.path.rename(self.target)
        self._is_published = True
        _sync_directory(self.target.parent)

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another process is writing {self.target}: wait for it, or give another name") from None
        for left in self.path.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.target):
            raise FileExistsError(f"{self.target} exists already, and nothing is replaced: give another name, or remove it")


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
