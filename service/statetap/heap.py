"""How much of what was freed the C library keeps.

glibc gives threads heaps of their own, eight for each core, and a heap keeps what lies below the last thing that is in use. From
heaps it also takes buffers as large as any that was freed before, up to 32 MiB. The service has some twenty threads that each
take a large buffer now and then: within two minutes of a soak its heaps held 28 MB of freed memory, and grew; like this they hold
one. That threads wait for a heap costs little, since one at a time runs Python. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes

HEAPS = 2
# From this size on, a buffer is a mapping of its own, and gone when it is freed.
MAPPED_BYTES = 256 << 10
# More than this at the end of the main heap is given back.
SPARE_BYTES = 512 << 10

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_little() -> None:
    """Tell this process' C library. To be called while there are few threads: heaps that are there stay.

    Other C libraries than glibc have no such heaps, and no `mallopt`.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for what, value in ((_M_ARENA_MAX, HEAPS), (_M_MMAP_THRESHOLD, MAPPED_BYTES), (_M_TRIM_THRESHOLD, SPARE_BYTES)):
            mallopt(what, value)
