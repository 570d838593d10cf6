"""How much memory this process's control group may hold. Pages of a tmpfs count: a budget above it gets the server killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# Version 1 says "no limit" with a number close to 2**63.
_NO_LIMIT = 1 << 60


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least `memory.max` (version 2) or `memory.limit_in_bytes` (version 1) of the control group and its parents, in bytes.

    None where there is no limit, or no control group that can be read.
    """
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container the path is often the host's, and only the mount's top is there.
        for directory in (group, *group.parents):
            limits += [int(text) for text in _lines(directory / name) if text.isdecimal()]
            if directory == mount:
                break
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
