"""Registers mapped pages with CUDA, so that a copy from the device into them is one of the device's own, and nobody waits for it.

The only module that knows CUDA's calls for it. PyTorch binds them as `torch.cuda.cudart()`, and pins shared memory by them itself
(torch/cuda/_pin_memory_utils.py). CUDA's manual: cudaHostRegister, cudaHostUnregister.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from statetap_sglang.pinned_files import Pages, RegistrationRefused

# cudaHostRegisterPortable: pinned for every context of the process.
_PORTABLE = 1


class CudaRegistration:
    """Registration with the CUDA device on which the model runs. `settle` waits for all copies to the host that were begun."""

    def __init__(self, device: torch.device, settle: Callable[[], None]) -> None:
        self._device = device
        self._settle = settle

    def register(self, pages: Pages) -> None:
        """Raises RegistrationRefused: a limit on locked memory, or a system that does not register mapped files."""
        self._call("cudaHostRegister", pages.ctypes.data, pages.nbytes, _PORTABLE)
        # To pages that are not pinned CUDA copies, too, but the forward path would wait for it.
        if not (_is_pinned(pages[:1]) and _is_pinned(pages[-1:])):
            self._call("cudaHostUnregister", pages.ctypes.data)
            raise RegistrationRefused("cudaHostRegister succeeded, and the pages are not pinned")

    def unregister(self, pages: Pages) -> None:
        """Raises RegistrationRefused: CUDA does not know these pages, or has failed altogether."""
        self._settle()
        self._call("cudaHostUnregister", pages.ctypes.data)

    def _call(self, name: str, *arguments: int) -> None:
        def call() -> int:
            # A thread's current device is 0 until it chooses: a context there is memory of somebody else's device.
            with torch.cuda.device(self._device):
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                return int(getattr(runtime, name)(*arguments))

        # In a thread of its own: CUDA reports a failed call once more, to the next kernel that the same thread launches.
        with ThreadPoolExecutor(1, "statetap-registration") as thread:
            code = thread.submit(call).result()
        if code:
            raise RegistrationRefused(f"{name}: {torch.cuda.CudaError(code)}; see `ulimit -l`")


def _is_pinned(pages: Pages) -> bool:
    return torch.from_numpy(pages).is_pinned()
