"""The plugin over a stub of SGLang, with dumps that land in their files: all of it but for CUDA's calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from statetap_sglang import opening
from statetap_sglang.beacon import Beacon
from statetap_sglang.configuration import ServerFacts, worker_name
from statetap_sglang.free_files import hand_back
from statetap_sglang.in_place import InPlacePublisher
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.settings import PluginSettings
from statetap_sglang.snapshot import SnapshotRing

from tests.fakes.registration import FakeRegistration
from tests.fakes.served_plugin import Serve, request


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRegistration:
    """From now on taps open as on CUDA, with this registration, and every dump is large enough."""
    registration = FakeRegistration()
    monkeypatch.setattr(opening, "RECYCLE_FROM_BYTES", 1)

    def publisher(settings: PluginSettings, facts: ServerFacts, beacon: Beacon, ring: SnapshotRing, _: Any) -> InPlacePublisher:
        name = worker_name(settings, facts.port)
        made = InPlacePublisher(settings.directory, name, beacon, registration=registration, limit_bytes=1 << 30)
        assert made.pinned is not None
        ring.land_in(made.pinned)
        return made

    monkeypatch.setattr(opening, "_publisher", publisher)
    return registration


def release_all(served: Any) -> None:
    for path in served.tap.glob("req_*"):
        hand_back(path, 1)


def test_states_are_right_whichever_way_they_went(serve: Serve, cuda: FakeRegistration) -> None:
    served = serve(FINAL="both", LAYERS="0,2,5")
    inodes: list[int] = []
    for turn in range(8):
        requests = [request(length) for length in (5, 9, 40)]
        served.run([(one, 0, len(one.origin_input_ids)) for one in requests])
        for one in requests:
            served.demand(one, [(0, len(one.origin_input_ids))])
        if turn >= 5:
            inodes += [path.stat().st_ino for path in served.tap.glob("req_*")]
        release_all(served)
    assert served.errors() == {}
    made = cuda.registered
    assert made >= 3
    assert len(inodes) == 9
    assert len(set(inodes)) <= made, "at steady state no file is made"
    assert served.plugin.open.tap._ring.held == 0


def test_chunks_land_one_by_one(serve: Serve, cuda: FakeRegistration) -> None:
    served = serve(FINAL="both")
    for _ in range(4):
        one = request(30)
        for start in (0, 10, 20):
            served.run([(one, start, 10)])
        served.demand(one, [(0, 10), (10, 20), (20, 30)])
        release_all(served)
    assert cuda.registered >= 1


def test_a_pass_that_fails_gives_its_files_back(serve: Serve, cuda: FakeRegistration, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    for _ in range(3):
        served.run([(request(9), 0, 9)])
        release_all(served)
    made = cuda.registered
    with monkeypatch.context() as failing:
        failing.setattr("statetap_sglang.snapshot.SnapshotRing.send", lambda *_: 1 / 0)
        lost = request(9)
        served.run([(lost, 0, 9)])
    assert "ZeroDivisionError" in served.errors()[lost.rid]
    one = request(9)
    served.run([(one, 0, 9)])
    served.demand(one, [(0, 9)])
    assert cuda.registered == made
    pinned = served.plugin.open.publisher.pinned
    assert pinned._count == len(pinned._ready) + len(pinned._published), "none is still lent"


def test_a_long_request_id_goes_through_the_ring(serve: Serve, cuda: FakeRegistration) -> None:
    served = serve()
    for _ in range(3):
        one = request(9)
        one.rid = "r" * 5000
        served.run([(one, 0, 9)])
        release_all(served)
    assert cuda.asked == 0
    assert served.errors() == {}


def test_where_registering_fails_captures_go_on_through_the_ring(serve: Serve, cuda: FakeRegistration) -> None:
    cuda.refuses = RuntimeError("operation not supported")
    served = serve()
    requests = [request(9) for _ in range(4)]
    for one in requests:
        served.run([(one, 0, 9)])
        served.demand(one, [(0, 9)])
    assert cuda.asked == 1
    assert served.errors() == {}


def test_on_a_cpu_the_setting_changes_nothing(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "statetap"):
        served = serve(PINNED_DUMP_BYTES="1G")
    assert "STATETAP_PLUGIN_PINNED_DUMP_BYTES has no effect: the model is on cpu, not on CUDA" in caplog.text
    assert type(served.plugin.open.publisher) is DumpPublisher
    one = request(9)
    served.run([(one, 0, 9)])
    served.demand(one, [(0, 9)])
