"""A tap's directory: private, locked while its publisher lives, swept when it does not.

The lock is a flock on the directory itself, so there is no lock file to go stale, and whoever holds it may remove the directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from statetap_sglang.format import BEACON_NAME, DUMP_PREFIX, REFUSAL_NAME

COUNTER_NAME = ".next"
# Released dumps that may be written over: see `free_files`.
FREE_DIRECTORY = ".free"
UNPUBLISHED_PREFIX = f".{DUMP_PREFIX}"
UNPUBLISHED_BEACON = f".{BEACON_NAME}"
UNPUBLISHED_REFUSAL = f".{REFUSAL_NAME}"

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", re.ASCII)
_TAP_NAME = re.compile(r"(?P<boot>[A-Za-z0-9_][A-Za-z0-9._-]{0,199})-(?P<rank>0|[1-9][0-9]{0,8})", re.ASCII)

# A probe holds a shared lock for microseconds; a publisher that meets one tries again.
_LOCK_ATTEMPTS = 20
_LOCK_PAUSE_SECONDS = 0.01


class TapError(RuntimeError):
    """A dump directory that cannot be used: the message names it, the reason and the way out."""


def check_name(what: str, name: str) -> None:
    """ValueError unless `name` is safe as one part of a path: letters, digits, `_`, `.` and `-`, no leading `.` or `-`."""
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} cannot be part of a path; use letters, digits, '_', '.' and '-'")


def tap_name(boot_id: str, dp_rank: int) -> str:
    return f"{boot_id}-{dp_rank}"


def boot_of(name: str) -> str | None:
    """The boot id of a tap directory's name, None if it is no such name."""
    found = _TAP_NAME.fullmatch(name)
    return found["boot"] if found else None


def ensure_private_directory(path: Path) -> None:
    """Create `path` with mode 0700 if it is missing (its parents with the default mode), else demand that it is ours alone.

    Raises:
        TapError: a symbolic link, not a directory, another user's, open to group or others, or not to be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise TapError(f"{path} cannot be created: {error.strerror}; create it (mode 0700), or use another") from error
    if stat.S_ISLNK(status.st_mode):
        raise TapError(f"{path} is a symbolic link; name the directory that it points to")
    if not stat.S_ISDIR(status.st_mode):
        raise TapError(f"{path} is not a directory; use another path")
    if status.st_uid != os.geteuid():
        users = f"{path} belongs to user {status.st_uid}, this is user {os.geteuid()}"
        raise TapError(f"{users}; run both as one user, or use another directory")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise TapError(f"{path} is open to others (mode {mode:04o}); use a directory of its own, or `chmod 700 {path}`")


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_tap(directory: Path) -> int:
    """Create the tap directory if need be and lock it; the lock lasts until the returned descriptor is closed.

    Raises:
        TapError: it cannot be used, or another publisher holds it.
    """
    for attempt in range(_LOCK_ATTEMPTS):
        if attempt:
            time.sleep(_LOCK_PAUSE_SECONDS)
        ensure_private_directory(directory)
        try:
            descriptor = _open_directory(directory)
        except FileNotFoundError:
            continue
        # A sweep may have removed the directory between these steps; then the lock is on something without a name.
        if _try_lock(descriptor, fcntl.LOCK_EX) and os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
    raise TapError(f"{directory} is locked by another publisher; end that process, or use another boot id")


def tap_is_alive(directory: Path) -> bool:
    """Whether a publisher holds the tap's lock. False if there is no such directory."""
    try:
        descriptor = _open_directory(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@contextmanager
def dead_tap(directory: Path) -> Iterator[bool]:
    """Hold a dead tap's lock; yields False, without a lock, where a publisher lives or the directory is gone."""
    try:
        descriptor = _open_directory(directory)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        yield _try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def sweep_unpublished(directory: Path) -> None:
    """Remove what a dead publisher left under dot-names, free files among it. The caller holds the lock."""
    for entry in list(os.scandir(directory)):
        if entry.name.startswith((UNPUBLISHED_PREFIX, UNPUBLISHED_BEACON, UNPUBLISHED_REFUSAL)):
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(entry.path)  # noqa: PTH108 (as scandir gives it)
    sweep_free(directory)


def sweep_free(directory: Path) -> None:
    """Remove the tap's free files and where they are. The caller holds the lock; what is handed back meanwhile may stay."""
    free = directory / FREE_DIRECTORY
    try:
        shutil.rmtree(free)
    except FileNotFoundError:
        return
    except OSError:
        with suppress(OSError):
            free.unlink()  # no directory: not the service's


def remove_dead_tap(directory: Path) -> bool:
    """Remove a tap directory that holds nothing but what its dead publisher kept for itself. False: left as it was."""
    with dead_tap(directory) as locked:
        if not locked:
            return False
        sweep_unpublished(directory)
        own = {BEACON_NAME, REFUSAL_NAME, COUNTER_NAME}
        if any(entry.name not in own for entry in os.scandir(directory)):
            return False
        for name in own:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
        return True
