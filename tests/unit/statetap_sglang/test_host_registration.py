"""Registering pages with CUDA: what is asked of it here, and, where there is a GPU, what it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from statetap_sglang import host_registration
from statetap_sglang.free_files import hand_back
from statetap_sglang.host_registration import CudaRegistration
from statetap_sglang.in_place import InPlacePublisher
from statetap_sglang.layout import CaptureLayout
from statetap_sglang.pinned_files import Landing, RegistrationRefused
from statetap_sglang.reader import open_dump
from statetap_sglang.snapshot import SnapshotRing, host_views

from tests.fakes.dumps import make_beacon, make_metadata
from tests.fakes.registration import FakeRegistration

PAGES = np.zeros(2 * 4096, np.uint8)
ADDRESS = PAGES.ctypes.data


class FakeCuda:
    """Stands for `torch.cuda`. `codes` are what the calls return, 0 by default; `pinned` is what CUDA says of the pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.codes: dict[str, int] = {}
        self.pinned = True
        self.threads: set[int] = set()
        self.CudaError = lambda code: RuntimeError(f"reason ({code})")
        monkeypatch.setattr(host_registration.torch, "cuda", self)
        monkeypatch.setattr(host_registration, "_is_pinned", lambda _: self.pinned)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(f"on {device}")
        yield

    def cudart(self) -> Any:
        def called(name: str) -> Any:
            def call(*arguments: int) -> int:
                self.threads.add(threading.get_ident())
                self.calls.append((name, *arguments))
                return self.codes.get(name, 0)

            return call

        return SimpleNamespace(**{name: called(name) for name in ("cudaHostRegister", "cudaHostUnregister")})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def registration(cuda: FakeCuda) -> CudaRegistration:
    return CudaRegistration(torch.device("cuda", 3), lambda: cuda.calls.append("settled"))


def test_pages_are_registered_on_the_models_device_and_unregistered_once_nothing_is_on_its_way(cuda: FakeCuda) -> None:
    registration(cuda).register(PAGES)
    registration(cuda).unregister(PAGES)
    assert cuda.calls == [
        "on cuda:3",
        ("cudaHostRegister", ADDRESS, PAGES.nbytes, 1),
        "settled",
        "on cuda:3",
        ("cudaHostUnregister", ADDRESS),
    ]


def test_cuda_is_asked_in_a_thread_that_launches_nothing(cuda: FakeCuda) -> None:
    """A failed call is reported once more to the next kernel launch of its thread: a capture would be lost for it."""
    cuda.codes["cudaHostRegister"] = 801
    with pytest.raises(RegistrationRefused, match=r"cudaHostRegister: reason \(801\); see `ulimit -l`"):
        registration(cuda).register(PAGES)
    assert threading.get_ident() not in cuda.threads


def test_pages_that_are_not_pinned_are_refused(cuda: FakeCuda) -> None:
    cuda.pinned = False
    with pytest.raises(RegistrationRefused, match="not pinned"):
        registration(cuda).register(PAGES)
    assert cuda.calls[-1] == ("cudaHostUnregister", ADDRESS)


def test_a_refusal_to_unregister_is_told(cuda: FakeCuda) -> None:
    cuda.codes["cudaHostUnregister"] = 719
    with pytest.raises(RegistrationRefused, match="719"):
        registration(cuda).unregister(PAGES)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_states_land_in_the_dumps_own_pages(shm: Path, kind: str) -> None:
    """Turn after turn the dump is what the device had, and it is one file. On a CPU this tests the test."""
    rows, device = 300, torch.device(kind, 0)
    beacon = make_beacon(recycle_from_bytes=1)
    layout = CaptureLayout(aux_layers=2, final="both", hidden_size=beacon.hidden_size, dtype=beacon.dtype)
    ring = SnapshotRing(layout, 1 << 20, device)
    registration = CudaRegistration(device, ring.settle) if kind == "cuda" else FakeRegistration()
    publisher = InPlacePublisher(shm, "worker", beacon, registration=registration, limit_bytes=1 << 30)
    assert publisher.pinned is not None
    ring.land_in(publisher.pinned)
    inodes = []
    for turn in range(10):
        snapshot = ring.reserve(rows, in_place=True)
        assert snapshot is not None
        torch.manual_seed(turn)
        for tensor in snapshot.tensors.values():
            tensor.copy_(1000 * torch.randn(tensor.shape, device=device))
        snapshot.add_checksums()
        expected = {name: tensor.cpu().view(torch.uint8).numpy().tobytes() for name, tensor in snapshot.tensors.items()}
        ring.send([snapshot]).wait()
        metadata, number = make_metadata("rid", rows), publisher.reserve()
        if isinstance(snapshot.span, Landing):
            assert all(tensor.is_pinned() for tensor in snapshot.host.values()) or kind == "cpu"
            path = publisher.directory / publisher.publish_in_place(metadata, snapshot.span, number)
            inodes.append(path.stat().st_ino)
        else:
            views = host_views(snapshot.host, layout.places(rows))
            path = publisher.directory / publisher.publish(metadata, views, number)
        ring.release(snapshot.span)
        with open_dump(path) as dump:
            dump.verify_rows()
            assert {name: bytes(view.data) for name, view in dump.tensors.items()} == expected
        hand_back(path, 1)
        publisher.tend()
    assert (len(inodes), len(set(inodes))) == (9, 1)
    publisher.close()
