"""Memory in large pages: where it lies, and whose it is."""

import os
from pathlib import Path

import numpy as np
import pytest
from statetap_client.large_pages import LARGE_PAGE_BYTES, large_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("nbytes", [1, LARGE_PAGE_BYTES, 3 * LARGE_PAGE_BYTES + 5])
def test_memory_begins_at_a_large_page_and_is_zero(nbytes) -> None:
    memory = large_pages(nbytes)
    assert memory.ctypes.data % LARGE_PAGE_BYTES == 0
    assert memory.shape == (nbytes,)
    assert not memory.any()


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this machine makes no large pages")
def test_the_kernel_may_make_large_pages_of_it() -> None:
    memory = large_pages(4 * LARGE_PAGE_BYTES)
    found = None
    eligible = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]) and not first.endswith(":"):
            found = range(*(int(end, 16) for end in first.split("-")))
        elif first == "THPeligible:" and found is not None and memory.ctypes.data in found:
            eligible[found] = line.split()[1]
    assert list(eligible.values()) == ["1"]


def test_a_fork_does_not_write_into_it() -> None:
    memory = large_pages(100)
    child = os.fork()
    if child == 0:
        memory[:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not np.any(memory)
