"""Snapshots of a pass's states, and their way to the host.

A model's outputs may alias buffers that its next pass reuses, so they are copied on the current stream, before the forward call
returns. On a CPU that copy goes straight into the ring. On CUDA it stays on the device, and a side stream carries it into the
ring, which is pinned, or into a pinned dump file where there is one; whoever publishes waits for that, and the forward path never
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from statetap_sglang.checksum import source_row_checksums
from statetap_sglang.format import HIDDEN_TENSORS, ROW_CHECKSUMS, TensorView
from statetap_sglang.layout import CaptureLayout, Place
from statetap_sglang.pinned_files import Landing, PinnedFiles
from statetap_sglang.ring import Ring, Span

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}


class Arrival(Protocol):
    """The moment at which snapshots have reached the host."""

    def wait(self) -> None:
        """Return once they have. Not for the forward path."""


@dataclass(frozen=True, slots=True)
class SampleSnapshot:
    """One sample's rows of one pass: `tensors` by the dump's names, where the pass writes them; `host` is where they arrive.

    `span` says which memory that is: the ring's, or a dump file's own. Once sent, `host` and `span` are all that is needed:
    whoever publishes must not keep the device's memory.
    """

    span: Span | Landing
    tensors: Mapping[str, torch.Tensor]
    host: Mapping[str, torch.Tensor]

    def add_checksums(self) -> None:
        """Take the rows' checksums from the snapshot, before anything is copied to the host."""
        hidden = [self.tensors[name] for name in HIDDEN_TENSORS if name in self.tensors]
        self.tensors[ROW_CHECKSUMS].copy_(source_row_checksums(hidden))


def host_views(host: Mapping[str, torch.Tensor], places: Mapping[str, Place]) -> dict[str, TensorView]:
    """A snapshot's tensors on the host, for a publisher: no copy, valid until its span is released."""
    return {
        name: TensorView(places[name].dtype, places[name].shape, tensor.view(torch.uint8).reshape(-1).numpy().data)
        for name, tensor in host.items()
    }


class SnapshotRing:
    """Snapshots in a ring of `capacity` bytes of host memory, reused over and over.

    `device` is where the model runs. For the forward path's thread, but for `release` and `settle`.
    """

    def __init__(self, layout: CaptureLayout, capacity: int, device: torch.device) -> None:
        self.layout = layout
        self._ring = Ring(capacity)
        self._on_device = device.type == "cuda"
        self._device = device
        self._bytes = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._on_device)
        self._side = _SideStream(device) if self._on_device else None
        self._files: PinnedFiles | None = None

    def land_in(self, files: PinnedFiles) -> None:
        """From now on, let snapshots arrive in these files where one fits, and in the ring where none does."""
        self._files = files

    @property
    def capacity(self) -> int:
        return self._ring.capacity

    @property
    def held(self) -> int:
        """Snapshots that are not released yet."""
        return self._ring.held

    def reserve(self, rows: int, *, in_place: bool = False) -> SampleSnapshot | None:
        """Room for one sample's rows, in its dump's own file where `in_place` allows it; None if the ring is full."""
        span = (self._borrow(rows) if in_place else None) or self._ring.reserve(self.layout.span_bytes(rows))
        if span is None:
            return None
        try:
            host = self._host(span, rows)
            tensors = host
            if self._on_device:
                tensors = {name: torch.empty_like(tensor, device=self._device) for name, tensor in host.items()}
        except BaseException:
            self.release(span)
            raise
        return SampleSnapshot(span, tensors, host)

    def send(self, snapshots: Sequence[SampleSnapshot]) -> Arrival:
        """Start the snapshots' way to the host, behind what the current stream was told to do so far."""
        if self._side is None:
            return _Here()
        return self._side.copy([(one.tensors[name], one.host[name]) for one in snapshots for name in one.tensors])

    def release(self, span: Span | Landing) -> None:
        """A snapshot's memory may be used again. From any thread."""
        if isinstance(span, Span):
            self._ring.release(span)
        elif self._files is not None:
            self._files.release(span.file)

    def settle(self) -> None:
        """Wait until nothing that was sent so far is on its way. Not for the forward path."""
        if self._side is not None:
            self._side.settle()

    def _borrow(self, rows: int) -> Landing | None:
        file = self._files.borrow(self.layout.file_bytes(rows)) if self._files is not None else None
        return None if file is None else Landing(file, self.layout.file_places(rows))

    def _host(self, span: Span | Landing, rows: int) -> dict[str, torch.Tensor]:
        if isinstance(span, Landing):
            memory = torch.from_numpy(span.file.pages)
            return {name: _view(memory, place) for name, place in span.places.items()}
        memory = self._bytes[span.start : span.start + span.nbytes]
        return {name: _view(memory, place) for name, place in self.layout.places(rows).items()}


def _view(memory: torch.Tensor, place: Place) -> torch.Tensor:
    return memory[place.offset : place.offset + place.nbytes].view(_DTYPES[place.dtype]).view(place.shape)


class _Here:
    """On a CPU a snapshot is on the host as soon as it is taken."""

    def wait(self) -> None:
        return


class _SideStream:
    """Copies to pinned memory beside the forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                # The allocator must not give the source's memory away before the side stream has read it.
                source.record_stream(self._stream)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _Arrived(done)

    def settle(self) -> None:
        self._stream.synchronize()


class _Arrived:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
