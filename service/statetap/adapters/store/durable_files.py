"""Files that survive a power cut: written whole, fsynced, and their directories too.

Publishing never replaces (`publish`); metadata is replaced as a whole (`replace_file`). Only threads call this module.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from statetap.ports import StoreError, StoreFull

# Linux takes at most IOV_MAX = 1024 buffers in one call.
MAX_BUFFERS = 1024
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def as_store_error(error: OSError, what: str) -> StoreError:
    """What the runtime gets to see of an operating system's error, `what` being what was tried."""
    if error.errno in _NO_SPACE:
        return StoreFull(f"no space left while {what}: free some, or raise the quota")
    return StoreError(f"{what} failed: {error}")


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_object(path: Path) -> None:
    """Make an object durable that zarr-python wrote, its name included. An object of nothing but fill values may not be there."""
    if path.exists():
        fsync_file(path)
    for directory in (path.parent, path.parent.parent):
        if directory.is_dir():
            fsync_directory(directory)


def make_directories(directory: Path) -> None:
    """Create `directory` and its parents; each one that was created is durable in its parent."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def write_all_at(descriptor: int, buffers: Sequence[memoryview], offset: int, *, block: int = 1) -> None:
    """Write every byte of `buffers` to the file's bytes from `offset` on, however often the kernel takes less.

    Each call begins at a multiple of `block` bytes, if all buffers are as long as one: what O_DIRECT asks for.
    """
    pending = [buffer for buffer in buffers if len(buffer)]
    at = 0
    while at < len(pending):
        written = os.pwritev(descriptor, pending[at : at + MAX_BUFFERS], offset)
        written -= written % block
        if not written:
            raise OSError(errno.EIO, f"the system takes less than {block} bytes of it")
        offset += written
        while at < len(pending) and written >= len(pending[at]):
            written -= len(pending[at])
            at += 1
        if written:
            pending[at] = pending[at][written:]


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`, replacing what is there in one step. The directory must exist."""
    temporary = path.with_name(f".{path.name}.partial")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        try:
            write_all_at(descriptor, [memoryview(data)], 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def publish(temporary: Path, final: Path) -> None:
    """Give a written file its final name, without replacing.

    Raises:
        FileExistsError: something has that name.
    """
    os.link(temporary, final)
    temporary.unlink()
