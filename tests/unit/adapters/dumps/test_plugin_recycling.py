"""Released dumps go back to a publisher that asks for them, and to no other; what nobody takes does not stay."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from statetap.adapters.dumps import PluginDumpSource
from statetap.ports import DumpRejected, DumpSeen
from statetap_sglang.format import BEACON_NAME
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.reader import open_dump
from statetap_sglang.tap import FREE_DIRECTORY

from tests.fakes.clock import HandClock
from tests.fakes.dumps import Listener, Publish, publish

RESCAN_SECONDS = 30.0


def free(publisher: DumpPublisher) -> list[str]:
    folder = publisher.directory / FREE_DIRECTORY
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


async def test_a_released_dump_is_written_over(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(recycle_from_bytes=1)
    await source.start(listener)
    inodes = set()
    for turn in range(1, 6):
        inodes.add(publish(publisher, str(turn)).stat().st_ino)
        (*_, seen) = await listener.wait(DumpSeen, turn)
        assert seen.dump.facts.rid == str(turn)
        seen.dump.release()
        seen.dump.release()
    assert len(inodes) == 1
    await source.rescan()
    assert listener.of(DumpRejected) == []
    assert len(listener.dumps) == 5


async def test_nothing_is_written_over_while_its_views_are_read(
    source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    """As of a unit that was abandoned while its inspector or its writer was at work in a thread."""
    publisher = tap(recycle_from_bytes=1)
    path = publish(publisher)
    inode = path.stat().st_ino
    await source.start(listener)
    view = next(iter(listener.dumps[0].views.values()))
    before = bytes(view)
    listener.dumps[0].release()
    assert publish(publisher).stat().st_ino != inode
    assert bytes(view) == before
    del view
    assert publish(publisher).stat().st_ino == inode


@pytest.mark.parametrize("least", [None, 1 << 20])
async def test_what_is_not_asked_for_is_removed(
    source: PluginDumpSource, tap: Publish, listener: Listener, least: int | None
) -> None:
    publisher = tap(recycle_from_bytes=least)
    path = publish(publisher)
    await source.start(listener)
    listener.dumps[0].release()
    assert not path.exists()
    assert free(publisher) == []


async def test_an_older_publisher_asks_for_nothing(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    beacon = publisher.directory / BEACON_NAME
    fields = json.loads(beacon.read_text())
    del fields["recycle_from_bytes"]
    beacon.write_text(json.dumps(fields))
    publish(publisher)
    await source.start(listener)
    listener.dumps[0].release()
    assert sorted(path.name for path in publisher.directory.iterdir()) == [".next", BEACON_NAME]


async def test_a_dead_publisher_gets_nothing_back(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(recycle_from_bytes=1)
    paths = [publish(publisher) for _ in range(3)]
    await source.start(listener)
    listener.dumps[0].release()
    assert len(free(publisher)) == 1
    assert publisher._lock is not None
    os.close(publisher._lock)  # killed: the kernel does this
    publisher._lock = None
    await source.rescan()
    assert free(publisher) == []
    listener.dumps[1].release()
    assert free(publisher) == []
    assert [path.exists() for path in paths] == [False, False, True]
    listener.dumps[2].release()
    await source.rescan()
    assert not publisher.directory.exists()


async def test_a_service_that_starts_again_finds_dumps_and_free_files(
    root: Path, source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    """It was killed with one dump released and one that was to be."""
    publisher = tap(recycle_from_bytes=1)
    released, held = publish(publisher, "released"), publish(publisher, "held")
    inodes = {path.stat().st_ino for path in (released, held)}
    await source.start(listener)
    listener.dumps[0].release()
    await source.close()
    del listener.dumps[1].views  # its memory goes with the process
    listener.dumps[1]._mapped.close()
    again, heard = PluginDumpSource(root, "worker", clock=HandClock()), Listener()
    await again.start(heard)
    assert [dump.facts.rid for dump in heard.dumps] == ["held"]
    heard.dumps[0].release()
    assert {publish(publisher).stat().st_ino for _ in range(2)} == inodes
    await again.close()


async def look(clock: HandClock) -> None:
    """Let the source look as it does now and then, and wait until it has."""
    async with asyncio.timeout(20):
        while clock.next_waking is None:
            await asyncio.sleep(0)
        clock.advance(RESCAN_SECONDS)
        while clock.next_waking != RESCAN_SECONDS:
            await asyncio.sleep(0)


async def test_what_two_looks_in_a_row_find_is_removed(
    source: PluginDumpSource, tap: Publish, listener: Listener, clock: HandClock
) -> None:
    publisher = tap(recycle_from_bytes=1)
    for _ in range(2):
        publish(publisher)
    await source.start(listener)
    for dump in listener.dumps:
        dump.release()
    await look(clock)
    publish(publisher)
    for _ in range(3):
        await source.rescan()  # is called for at any rate, and counts for nothing
    assert len(free(publisher)) == 1
    listener.dumps[2].release()
    await look(clock)
    assert free(publisher) == ["2.20480"], "of what was there before, all but what was taken meanwhile"
    await look(clock)
    assert free(publisher) == []


async def test_a_dump_that_cannot_be_removed_may_be_released_again(
    source: PluginDumpSource, tap: Publish, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = tap(recycle_from_bytes=1)
    path = publish(publisher)
    await source.start(listener)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as failing:
        failing.setattr("statetap.adapters.dumps.tap_directory.hand_back", refuse)
        with pytest.raises(PermissionError):
            listener.dumps[0].release()
    with open_dump(path) as dump:
        assert dump.metadata.rid == "rid"
    listener.dumps[0].release()
    assert not path.exists()
