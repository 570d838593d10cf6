"""What a power cut would leave of a folder: each file's bytes and each folder's names as they were when it was last synced.

A layer over `os.fsync` and `os.fdatasync`; the harshest of file systems, which keeps nothing that nobody asked it to keep.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class PowerCut:
    """Watches what is synced below `root`, which itself is there. `at_each_sync` is called before each takes effect."""

    def __init__(self, root: Path, at_each_sync: Callable[[PowerCut], None] = lambda _: None) -> None:
        self._root = root
        self._at_each_sync = at_each_sync
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._folders: set[int] = set()
        self._lock = threading.Lock()
        self.syncs = 0
        for folder, _, files in os.walk(root):
            self._synced_folder(Path(folder))
            for name in files:
                path = Path(folder, name)
                self._bytes[path.stat().st_ino] = path.read_bytes()

    def leaves(self) -> dict[str, bytes]:
        """The files, by path below the root."""
        with self._lock:
            return dict(self._below(self._root.stat().st_ino, ""))

    def synced(self, descriptor: int) -> None:
        """Take note of a sync that is about to be done."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self._root):
            return
        with self._lock:
            self.syncs += 1
        self._at_each_sync(self)
        with self._lock:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._synced_folder(path)
            else:
                with Path(f"/proc/self/fd/{descriptor}").open("rb") as again:
                    self._bytes[os.fstat(descriptor).st_ino] = again.read()

    def _synced_folder(self, folder: Path) -> None:
        inode = folder.stat().st_ino
        self._folders.add(inode)
        self._names[inode] = {entry.name: entry.inode() for entry in os.scandir(folder)}
        self._folders.update(entry.inode() for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))

    def _below(self, inode: int, prefix: str) -> Iterator[tuple[str, bytes]]:
        for name, child in self._names.get(inode, {}).items():
            if child in self._folders:
                yield from self._below(child, f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", self._bytes.get(child, b"")


@contextmanager
def power_cut(
    monkeypatch: pytest.MonkeyPatch, root: Path, at_each_sync: Callable[[PowerCut], None] = lambda _: None
) -> Iterator[PowerCut]:
    """Watch while the block runs."""
    cut = PowerCut(root, at_each_sync)
    with monkeypatch.context() as patched:
        for name in ("fsync", "fdatasync"):
            sync = getattr(os, name)

            def watched(descriptor: int, sync: Callable[[int], None] = sync) -> None:
                cut.synced(descriptor)
                sync(descriptor)

            patched.setattr(os, name, watched)
        yield cut
