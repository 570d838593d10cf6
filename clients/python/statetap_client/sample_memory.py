"""Memory for samples: one block a sample, each of its arrays from the start of a page on.

A `SampleBuffer` is reused from sample to sample. In a DataLoader's worker process, memory is shared memory, so that what the
worker read is not copied once more on its way to the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from statetap_client.byte_ranges import PAGE_BYTES
from statetap_client.large_pages import large_pages

if TYPE_CHECKING:
    import torch

# Below this, memory of its own costs less than a mapping.
_MAPPED_FROM_BYTES = 1 << 20


# Name of an array → its shape and dtype.
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class Block:
    """`nbytes` of memory that begins at a page: as numpy sees it, and where torch made it, as torch does."""

    def __init__(self, array: NDArray[np.uint8], tensor: torch.Tensor | None = None) -> None:
        self.array = array
        self.tensor = tensor

    def tensor_of(self, part: NDArray[Any], dtype: str) -> torch.Tensor:
        """A part of the block as a torch tensor of `dtype`, torch's name for it. Nothing is copied or converted."""
        import torch

        as_dtype = getattr(torch, dtype)
        if self.tensor is None:
            return torch.from_numpy(part.view(np.uint8).reshape(-1)).view(as_dtype).view(part.shape)
        start = part.ctypes.data - self.array.ctypes.data
        return self.tensor[start : start + part.nbytes].view(as_dtype).view(part.shape)


class SampleBuffer:
    """Memory that is used again for every sample that is read into it; it grows to the longest one.

    What was read before is overwritten: copy it, or be done with it. `pinned` memory can be copied to a GPU while the CPU goes
    on; by default it is pinned where torch finds CUDA.
    """

    def __init__(self, *, pinned: bool | None = None) -> None:
        self._pinned = pinned
        self._block: Block | None = None

    def block(self, nbytes: int) -> Block:
        """The buffer's memory, at least `nbytes` of it.

        Raises:
            RuntimeError: in a DataLoader's worker, where a sample is still on its way when the next one is read.
        """
        if in_dataloader_worker():
            raise RuntimeError("a buffer cannot be reused in a DataLoader's worker: leave it out, and each sample gets its own")
        if self._block is None or len(self._block.array) < nbytes:
            self._block = None
            self._block = self._pin(nbytes) if self._is_pinned() else _mapped(nbytes)
        return self._block

    def _is_pinned(self) -> bool:
        if self._pinned is None:
            import torch

            self._pinned = torch.cuda.is_available()
        return self._pinned

    def _pin(self, nbytes: int) -> Block:
        import torch

        # CUDA gives whole pages.
        tensor = torch.empty(_whole_pages(nbytes), dtype=torch.uint8, pin_memory=True)
        return Block(tensor.numpy(), tensor)

    def __getstate__(self) -> Mapping[str, Any]:
        return {"_pinned": self._pinned, "_block": None}


def new_block(nbytes: int) -> Block:
    """Memory of its own."""
    if in_dataloader_worker():
        return _shared(nbytes)
    if nbytes < _MAPPED_FROM_BYTES:
        memory = np.empty(_whole_pages(nbytes) + PAGE_BYTES, np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        return Block(memory[start : start + _whole_pages(nbytes)])
    return _mapped(nbytes)


def in_dataloader_worker() -> bool:
    # Whoever has not imported torch is nobody's worker.
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def parts(block: Block, shapes: Shapes) -> dict[str, NDArray[Any]]:
    """The block cut into arrays of these shapes and dtypes, each from the start of a page on."""
    found = {}
    start = 0
    for name, (shape, dtype) in shapes.items():
        nbytes = int(np.prod(shape)) * dtype.itemsize
        found[name] = block.array[start : start + nbytes].view(dtype).reshape(shape)
        start += _whole_pages(nbytes)
    return found


def bytes_for(shapes: Shapes) -> int:
    """What `parts` needs."""
    return sum(_whole_pages(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in shapes.values())


def memory_of(block: Block, part: NDArray[Any]) -> memoryview:
    """The bytes of a part, and the rest of its last page."""
    start = part.ctypes.data - block.array.ctypes.data
    return block.array[start : start + _whole_pages(part.nbytes)].data


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _mapped(nbytes: int) -> Block:
    # A fresh sample's page faults would take longer than its reading.
    return Block(large_pages(max(_whole_pages(nbytes), PAGE_BYTES)))


def _shared(nbytes: int) -> Block:
    import torch

    # What torch's own collation of batches does in a worker.
    storage = torch.UntypedStorage._new_shared(max(_whole_pages(nbytes), PAGE_BYTES))  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    return Block(tensor.numpy(), tensor)
