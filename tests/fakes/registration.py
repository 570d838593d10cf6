"""CUDA's registration of pages, as far as pinned files are concerned: nothing here has a GPU, but the rules can be held to."""

from __future__ import annotations

from pathlib import Path

from statetap_sglang.pinned_files import Pages, RegistrationRefused


class FakeRegistration:
    """Knows what is registered; `registered` counts all that ever were. `refuses` and `keeps` make the calls fail."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.registered = 0
        self.asked = 0
        self.refuses: Exception | None = None
        self.keeps: str | None = None

    def register(self, pages: Pages) -> None:
        self.asked += 1
        if self.refuses is not None:
            raise self.refuses
        address = pages.ctypes.data
        if address % 4096 or address in self.pages or not is_mapped(address, pages.nbytes):
            raise RegistrationRefused(f"{address:#x} cannot be registered")
        self.pages[address] = pages.nbytes
        self.registered += 1

    def unregister(self, pages: Pages) -> None:
        if self.keeps is not None:
            raise RegistrationRefused(self.keeps)
        assert is_mapped(pages.ctypes.data, pages.nbytes), "unmapped before it was unregistered"
        assert self.pages.pop(pages.ctypes.data) == pages.nbytes

    def demand_mapped(self) -> None:
        """Whatever is registered is mapped."""
        assert all(is_mapped(address, nbytes) for address, nbytes in self.pages.items())


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether a shared mapping covers these addresses. Neighbours of one file may be shown as one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= address and address + nbytes <= stop and permissions[3] == "s":
            return True
    return False
