"""Dataset files named by a client: opened only below a configured root."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from statetap.ports import DatasetRefused

SUFFIXES = (".ndjson", ".jsonl", ".ndjson.gz", ".jsonl.gz")


def open_below(path: str, roots: Sequence[Path]) -> FileIO:
    """Open the regular file `path`, absolute or relative to a root. Links may lead about below the roots, but not out of them.

    Raises:
        DatasetRefused: no root is configured, or the file is elsewhere, missing, not a file, or of another kind.
    """
    if not roots:
        raise DatasetRefused(
            "no dataset root is configured, so no path can be read; send the body, or configure a root", field="path"
        )
    if not path.endswith(SUFFIXES):
        raise DatasetRefused(f"{path!r} is not one of {', '.join(SUFFIXES)}; rename or convert it", field="path")
    resolved_roots = [root.resolve() for root in roots]
    for root in resolved_roots:
        file = _resolve(root, path)
        below = next((other for other in resolved_roots if file is not None and file.is_relative_to(other)), None)
        if file is not None and below is not None:
            return _open_regular(below, file.relative_to(below), path)
    # The same words for a file outside and for none at all: what else is on this machine is nobody's business.
    raise DatasetRefused(
        f"there is no file {path!r} below {', '.join(map(str, roots))}; put it there, or send the body", field="path"
    )


def _resolve(root: Path, path: str) -> Path | None:
    try:
        return (root / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # missing; a loop of links; a NUL byte
        return None


def _open_regular(root: Path, below: Path, path: str) -> FileIO:
    try:
        descriptor = _descend(root, below)
    except OSError as error:
        raise DatasetRefused(
            f"{path!r} cannot be read: {error.strerror}; let the service's user read it", field="path"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatasetRefused(f"{path!r} is not a regular file; name a file", field="path")
    return FileIO(descriptor, "rb")


def _descend(root: Path, below: Path) -> int:
    """Open a resolved path one folder at a time, each by its descriptor: it has no links, so one met now was put there since."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    for part in below.parts:
        outer = descriptor
        try:
            # Without O_NONBLOCK opening a FIFO waits for a writer.
            descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=outer)
        finally:
            os.close(outer)
    return descriptor
