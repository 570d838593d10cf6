"""A process of its own each time: how many heaps the C library has made cannot be undone."""

import json
import subprocess
import sys

from statetap import heap

SCRIPT = """
import ctypes, json, threading
from statetap.heap import keep_little

if {little}:
    keep_little()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
everybody = threading.Barrier(7)

class Usage(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc.mallinfo2.restype = Usage

def take_and_free():
    large, _ = libc.malloc(ctypes.c_size_t(8 << 20)), libc.malloc(ctypes.c_size_t(4096))
    libc.free(ctypes.c_void_p(large))
    # As large as what was freed: now from the heap, unless told otherwise, with something that stays above it.
    large, _ = libc.malloc(ctypes.c_size_t(8 << 20)), libc.malloc(ctypes.c_size_t(4096))
    libc.free(ctypes.c_void_p(large))
    everybody.wait()

threads = [threading.Thread(target=take_and_free) for _ in range(6)]
for thread in threads:
    thread.start()
everybody.wait()
for thread in threads:
    thread.join()
print(json.dumps(libc.mallinfo2().fordblks), flush=True)
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def kept(*, little: bool) -> tuple[int, int]:
    """How many heaps there are, and the bytes in them that nobody uses."""
    script = SCRIPT.format(little=little)
    free, _, heaps = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.partition(
        "\n"
    )
    return heaps.count("<heap nr="), json.loads(free)


def test_threads_share_heaps_that_keep_little_of_what_was_freed():
    heaps, free = kept(little=True)
    others, others_free = kept(little=False)
    assert heaps <= heap.HEAPS < others
    assert free < 8 << 20 < others_free
