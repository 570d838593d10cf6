"""Looking at a large capture does not leave it in the process's memory: a dump's pages are the kernel's already."""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart

MIB = 1 << 20


def resident_bytes(path: Path) -> int:
    """Of the process's mappings of a file."""
    found = re.search(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture
def path() -> Iterator[Path]:
    """In shared memory, as dumps are: other file systems may hand out two megabytes for every byte that is looked at."""
    with tempfile.NamedTemporaryFile(prefix="statetap-test-", dir="/dev/shm") as file:
        yield Path(file.name)


async def test_a_large_dump_is_let_go_of_as_it_is_looked_at(path: Path) -> None:
    np.random.default_rng(0).integers(1, 1000, 16 * MIB, dtype=np.uint16).tofile(path)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    inspector = ThreadedCaptureInspector()
    array = HiddenArray("last_hidden_states", (4096,), "bfloat16")
    report = await inspector.inspect([CapturePart({array.name: memoryview(mapping)}, None)], [array])
    inspector.close()
    assert report.refusal is None
    # The rows of which norms are taken come back, each with the 64 KiB around it.
    assert resident_bytes(path) < 4 * MIB
