from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from statetap_sglang import snapshot
from statetap_sglang.checksum import differing_rows, row_checksums
from statetap_sglang.layout import CaptureLayout
from statetap_sglang.snapshot import SnapshotRing, host_views

LAYOUT = CaptureLayout(aux_layers=2, final="both", hidden_size=6, dtype="bfloat16")


def ring(spans: float = 2.0) -> SnapshotRing:
    return SnapshotRing(LAYOUT, int(LAYOUT.span_bytes(5) * spans), torch.device("cpu"))


def fill(one: snapshot.SampleSnapshot, value: float) -> None:
    for tensor in one.tensors.values():
        tensor.fill_(value)
    one.add_checksums()


def test_places_do_not_overlap_and_lie_in_the_span() -> None:
    places = sorted(LAYOUT.places(5).values(), key=lambda place: place.offset)
    assert all(place.offset % 64 == 0 for place in places)
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(places))
    assert places[-1].offset + places[-1].nbytes <= LAYOUT.span_bytes(5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_views_are_the_snapshots_bytes(dtype: str) -> None:
    layout = CaptureLayout(aux_layers=2, final="both", hidden_size=6, dtype=dtype)
    snapshots = SnapshotRing(layout, layout.span_bytes(5), torch.device("cpu"))
    one = snapshots.reserve(5)
    assert one is not None
    torch.manual_seed(0)
    expected = {}
    for name, tensor in one.tensors.items():
        values = torch.randn(tensor.shape) if tensor.is_floating_point() else torch.arange(5)
        tensor.copy_(values)
        expected[name] = tensor.clone()
    one.add_checksums()
    views = host_views(one.host, layout.places(5))
    assert views.keys() == {
        "token_ids", "aux_hidden_states", "last_hidden_states", "last_hidden_states_prenorm", "row_checksums"
    }  # fmt: skip
    for name in views.keys() - {"row_checksums"}:
        assert bytes(views[name].data) == expected[name].view(torch.uint8).numpy().tobytes()
        assert views[name].shape == tuple(expected[name].shape)
    assert np.frombuffer(views["row_checksums"].data, np.int64).tolist() == row_checksums(views).tolist()
    assert differing_rows(views) == []


def test_a_full_ring_gives_nothing_until_something_is_released() -> None:
    snapshots = ring(2)
    first, second = snapshots.reserve(5), snapshots.reserve(5)
    assert first is not None
    assert second is not None
    fill(first, 1.0)
    fill(second, 2.0)
    assert snapshots.reserve(1) is None
    assert float(first.tensors["last_hidden_states"].min()) == 1.0
    snapshots.release(first.span)
    third = snapshots.reserve(5)
    assert third is not None
    fill(third, 3.0)
    assert float(second.tensors["last_hidden_states"].min()) == 2.0
    assert snapshots.held == 2


class StreamRecorder:
    """Stands for `torch.cuda`: nothing here has a GPU, but the order of what is asked of it can be checked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        recorder = self

        class Stream:
            def __init__(self, _device: object = None) -> None:
                pass

            def wait_stream(self, _other: object) -> None:
                recorder.calls.append("side waits for current")

            def synchronize(self) -> None:
                recorder.calls.append("settled")

            def __enter__(self) -> None:
                recorder.calls.append("on side")

            def __exit__(self, *_: object) -> None:
                recorder.calls.append("off side")

        class Event:
            def record(self, stream: object) -> None:
                recorder.calls.append(f"event on {type(stream).__name__}")

            def synchronize(self) -> None:
                recorder.calls.append("waited")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, _device: object) -> str:
        return "current"

    def stream(self, stream: Any) -> Any:
        return stream


class DeviceTensor:
    """A tensor on a device, as far as the side stream is concerned."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def copy_(self, _source: object, *, non_blocking: bool) -> None:
        self.calls.append(f"copy, non_blocking={non_blocking}")

    def record_stream(self, _stream: object) -> None:
        self.calls.append("source is in use on side")


def test_the_side_stream_waits_for_the_pass_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StreamRecorder()
    monkeypatch.setattr(snapshot.torch, "cuda", recorder)
    tensor: Any = DeviceTensor(recorder.calls)
    arrival = snapshot._SideStream(torch.device("cuda")).copy([(tensor, tensor)])
    assert recorder.calls == [
        "side waits for current",
        "on side",
        "copy, non_blocking=True",
        "source is in use on side",
        "event on Stream",
        "off side",
    ]
    arrival.wait()
    assert recorder.calls[-1] == "waited"


def test_settling_waits_for_the_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StreamRecorder()
    monkeypatch.setattr(snapshot.torch, "cuda", recorder)
    snapshots = ring()
    snapshots.settle()
    assert recorder.calls == []
    snapshots._side = snapshot._SideStream(torch.device("cuda"))
    snapshots.settle()
    assert recorder.calls == ["settled"]
