from __future__ import annotations

from pathlib import Path

import pytest
from statetap_sglang.memory_limit import memory_limit


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000\n"}, 1000000),
        # The least of a group and its parents holds.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": "500\n",
                "sys/fs/cgroup/memory.max": "900\n",
            },
            500,
        ),
        # In a container the group's path is the host's, and only the top is there.
        ({"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/memory.max": "700\n"}, 700),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "300\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            300,
        ),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_limits(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert memory_limit(write(tmp_path, files)) == limit
