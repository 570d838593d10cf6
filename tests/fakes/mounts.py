"""A small file system of its own, so that a test can fill it. Mounting needs root."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TRIES_TO_FILL = 100


@contextmanager
def tmpfs(at: Path, options: str) -> Iterator[str | None]:
    """A tmpfs mounted at `at` with these options, or why that is not allowed here."""
    at.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", str(at)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        yield mounted.stderr.strip() or "mount failed"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@contextmanager
def small_tmpfs(at: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of `nbytes` mounted at `at`; skips the test where mounting is not allowed."""
    with tmpfs(at, f"size={nbytes}") as refused:
        if refused is not None:
            pytest.skip(f"no file system can be mounted here: {refused}")
        yield at


def fill(at: Path, *, leave: int) -> Path:
    """Fill the file system at `at` but for `leave` bytes; the file that does is returned, to be removed.

    Raises:
        OSError: others take the room faster than it can be filled.
    """
    ballast = at / ".ballast"
    with ballast.open("wb") as file:
        for left in reversed(range(TRIES_TO_FILL)):
            free = os.statvfs(at)
            room = free.f_bavail * free.f_frsize - leave
            if room <= 0:
                break
            try:
                os.posix_fallocate(file.fileno(), 0, room)
                break
            except OSError as error:
                # Somebody wrote since the room was asked for.
                if error.errno != errno.ENOSPC or not left:
                    ballast.unlink()
                    raise
    return ballast
