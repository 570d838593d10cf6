from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from statetap_sglang.background import BackgroundPublisher, Dump, PublishPass
from statetap_sglang.checks import CaptureFailed
from statetap_sglang.format import DumpMetadata, TensorView
from statetap_sglang.pinned_files import Landing
from statetap_sglang.publisher import PublishError

from tests.fakes.dumps import make_metadata


class Recorder:
    """A publisher in memory; `breaks` makes it fail."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int | None]] = []
        self.lost: list[tuple[str, str, int | None]] = []
        self.breaks: Exception | None = None

    def publish(self, metadata: DumpMetadata, tensors: Mapping[str, TensorView], number: int | None = None) -> str:
        if self.breaks is not None:
            raise self.breaks
        self.published.append((metadata.rid, number))
        return "name"

    def publish_error(self, rid: str, reason: str, number: int | None = None) -> None:
        self.lost.append((rid, reason, number))


class InPlaceRecorder:
    """Publishes what landed, in memory. `tended` is set each time; `breaks` makes tending fail. Also an arrival that is there."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.tended = threading.Event()
        self.breaks: Exception | None = None

    def wait(self) -> None:
        self.happened.append("arrived")

    def publish_in_place(self, metadata: DumpMetadata, landing: Landing, number: int) -> str:
        self.happened.append(f"{metadata.rid} published as {number}")
        return "name"

    def tend(self) -> None:
        self.happened.append("tended")
        self.tended.set()
        if self.breaks is not None:
            raise self.breaks


class Gate:
    """An arrival that comes when the test says so."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> None:
        assert self.opened.wait(30)


def here() -> Gate:
    gate = Gate()
    gate.opened.set()
    return gate


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def background(recorder: Recorder) -> Iterator[BackgroundPublisher]:
    background = BackgroundPublisher(recorder)
    yield background
    background.close()


def dump(rid: str, number: int, released: list[int], views: Mapping[str, TensorView] | None = None) -> Dump:
    return Dump(number, make_metadata(rid, 1), lambda: views or {}, lambda: released.append(number))


def fails(error: Exception) -> NoReturn:
    raise error


def test_dumps_are_published_in_order_and_released(recorder: Recorder, background: BackgroundPublisher) -> None:
    released: list[int] = []
    background.publish(PublishPass(here(), lambda: None, (dump("a", 0, released), dump("b", 1, released))))
    background.lose("c", "why", 2)
    background.drain()
    assert recorder.published == [("a", 0), ("b", 1)]
    assert recorder.lost == [("c", "why", 2)]
    assert released == [0, 1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PublishError("a", "No space left on device"), "No space left on device"),
        (ValueError("odd"), "publishing failed: ValueError: odd"),
        (MemoryError(), "publishing failed: MemoryError: "),
    ],
)
def test_what_cannot_be_published_is_lost_with_a_reason(
    recorder: Recorder, background: BackgroundPublisher, error: Exception, reason: str
) -> None:
    recorder.breaks = error
    released: list[int] = []
    background.publish(PublishPass(here(), lambda: None, (dump("a", 7, released),)))
    background.drain()
    assert recorder.lost == [("a", reason, 7)]
    assert released == [7]
    recorder.breaks = None
    background.publish(PublishPass(here(), lambda: None, (dump("b", 8, released),)))
    background.drain()
    assert recorder.published == [("b", 8)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CaptureFailed("not of this pass"), "not of this pass"),
        (RuntimeError("gone"), "did not reach the host: RuntimeError: gone"),
    ],
)
def test_a_pass_that_is_not_sound_loses_all_its_captures(
    recorder: Recorder, background: BackgroundPublisher, error: Exception, reason: str
) -> None:
    released: list[int] = []
    background.publish(PublishPass(here(), lambda: fails(error), (dump("a", 0, released), dump("b", 1, released))))
    background.drain()
    assert [(rid, number) for rid, _, number in recorder.lost] == [("a", 0), ("b", 1)]
    assert all(reason in why for _, why, _ in recorder.lost)
    assert released == [0, 1]


def test_a_full_queue_never_waits_and_says_how_many_were_lost(recorder: Recorder) -> None:
    background = BackgroundPublisher(recorder, max_waiting=2)
    gate, released = Gate(), []
    background.publish(PublishPass(gate, lambda: None, (dump("first", 0, released),)))
    for number in range(1, 6):  # none of these calls may wait: the thread waits at the gate
        background.publish(PublishPass(here(), lambda: None, (dump(f"r{number}", number, released),)))
    background.lose("late", "why")
    dropped = len(released)
    gate.opened.set()
    background.drain()
    background.close()
    assert dropped >= 3
    assert sorted(released) == list(range(6))
    assert len(recorder.published) == 6 - dropped
    (record,) = recorder.lost
    assert record[1] == f"{dropped + 1} captures were lost while the publisher was behind"


def test_what_landed_is_published_in_place_and_files_are_tended_after_it(recorder: Recorder) -> None:
    in_place, released = InPlaceRecorder(), list[int]()
    background = BackgroundPublisher(recorder, in_place=in_place, tend_seconds=3600)
    landing: Any = object()
    landed = replace(dump("landed", 1, released), landing=landing)
    background.publish(PublishPass(in_place, lambda: None, (dump("through the ring", 0, released), landed)))
    background.drain()
    assert in_place.happened == ["arrived", "landed published as 1", "tended"]
    assert (recorder.published, released) == ([("through the ring", 0)], [0, 1])
    background.publish(PublishPass(in_place, lambda: fails(CaptureFailed("why")), (replace(landed, number=2),)))
    background.drain()
    assert in_place.happened[3:] == ["arrived", "tended"]
    assert recorder.lost == [("landed", "why", 2)]
    background.close()


def test_files_are_tended_without_a_pass_and_whatever_comes_of_it(recorder: Recorder) -> None:
    in_place = InPlaceRecorder()
    in_place.breaks = OSError("odd")
    background = BackgroundPublisher(recorder, in_place=in_place, tend_seconds=0.001)
    for _ in range(2):
        assert in_place.tended.wait(30)
        in_place.tended.clear()
    released: list[int] = []
    background.publish(PublishPass(here(), lambda: None, (dump("a", 0, released),)))
    background.drain()
    assert (recorder.published, released) == ([("a", 0)], [0])
    background.close()


def test_a_publisher_that_cannot_even_record_does_not_end_the_thread(recorder: Recorder) -> None:
    background = BackgroundPublisher(recorder)
    recorder.lost = None  # type: ignore[assignment]
    background.lose("a", "why")
    background.drain()
    released: list[int] = []
    background.publish(PublishPass(here(), lambda: None, (dump("b", 1, released),)))
    background.drain()
    background.close()
    assert recorder.published == [("b", 1)]
