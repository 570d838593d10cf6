"""Looks at a worker's dump directory on this machine, and creates and removes nothing there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from statetap_client.schemas import PlainDumps, PluginDumps
from statetap_sglang.beacon import Beacon
from statetap_sglang.format import DumpFormatError
from statetap_sglang.refusal import Refusal
from statetap_sglang.tap import boot_of, tap_is_alive

from statetap.runtime.doctor.inputs import DirectoryFacts

BLOCK_BYTES = 512
# Version 1 of cgroups says "no limit" with a number near 2**63.
NO_LIMIT_BYTES = 1 << 60


def worker_directory(dumps: PluginDumps | PlainDumps, name: str) -> Path:
    return Path(dumps.dir) / name if isinstance(dumps, PluginDumps) else Path(dumps.dir)


def look_at_directory(path: Path) -> DirectoryFacts:
    """What there is to see; a directory that this user cannot read is told as a fault."""
    neighbours = tuple(sorted(other.name for other in _folders(path.parent) if other.name != path.name))
    if not path.is_dir():
        return DirectoryFacts(path=path, exists=False, neighbours=neighbours)
    taps: list[Beacon] = []
    refusals: list[str] = []
    faults: list[str] = []
    try:
        watched = tap_is_alive(path)
        for tap in sorted(child for child in path.iterdir() if boot_of(child.name) is not None and tap_is_alive(child)):
            try:
                _read_tap(tap, taps, refusals, faults)
            except DumpFormatError as error:
                faults.append(str(error))
    except OSError as error:
        return DirectoryFacts(path=path, exists=True, neighbours=neighbours, faults=(f"{path}: {error.strerror}",))
    space = os.statvfs(path)
    limits = [limit for tap in taps if (limit := memory_limit(tap.pid)) is not None]
    return DirectoryFacts(
        path=path,
        exists=True,
        watched=watched,
        neighbours=neighbours,
        taps=tuple(taps),
        refusals=tuple(refusals),
        faults=tuple(faults),
        filesystem=filesystem_of(path),
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        held_bytes=_held_bytes(path),
        memory_limit_bytes=min(limits, default=memory_limit(None)),
    )


def _read_tap(tap: Path, taps: list[Beacon], refusals: list[str], faults: list[str]) -> None:
    with suppress(FileNotFoundError):
        refusals.append(Refusal.read(tap).reason)
        return
    try:
        taps.append(Beacon.read(tap))
    except FileNotFoundError:
        faults.append(f"{tap} has not announced itself: its server is still starting, or its plugin failed")


def memory_limit(pid: int | None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least memory limit in bytes that holds for a process (None: for this one): of its cgroups, else of the machine.

    tmpfs pages count towards the cgroup of whoever wrote them. A process of another container may be out of sight here, or
    its id somebody else's; then what holds for this process is told.
    """
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]))
    for process in ([str(pid)] if pid else []) + ["self"]:
        with suppress(OSError):
            limits += _cgroup_limits((proc / process / "cgroup").read_text(encoding="utf-8"), cgroups)
            break
    return min(limits, default=None)


def _cgroup_limits(membership: str, cgroups: Path) -> list[int]:
    """The limits of a process's memory cgroup and of all above it, of either version."""
    found = []
    for line in membership.splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / place.lstrip("/")
        # In a container the path is the host's, and only the root of it is there.
        for level in (group, *group.parents):
            with suppress(OSError, ValueError):
                limit = int((level / file).read_text(encoding="utf-8"))
                found += [limit] if limit < NO_LIMIT_BYTES else []
            if level == root:
                break
    return found


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that `path` is on, such as `tmpfs`; empty if it cannot be told."""
    resolved = path.resolve()
    best, kind = -1, ""
    with suppress(OSError, ValueError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            fields = line.split(" ")
            point = Path(fields[4].replace("\\040", " "))
            # A later mount on the same point hides an earlier one.
            if resolved.is_relative_to(point) and len(point.parts) >= best:
                best, kind = len(point.parts), fields[fields.index("-") + 1]
    return kind


def _folders(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []


def _held_bytes(path: Path) -> int:
    held = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                held += os.lstat(f"{folder}/{name}").st_blocks * BLOCK_BYTES
    return held
