from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest
from statetap.adapters.dumps import PluginDumpSource, plugin
from statetap.ports import CaptureLost, DumpRejected, DumpSeen, DumpSourceError, TapSeen
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.tap import lock_tap

from tests.fakes.clock import HandClock
from tests.fakes.dumps import Listener, Publish, make_beacon, make_tensors, publish


def rids(listener: Listener) -> list[str]:
    return [dump.facts.rid for dump in listener.dumps]


async def test_facts_of_a_dump(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    publish(publisher, "first")
    path = publish(publisher, "rid", 5, prefix_len=7, prompt_len=12, retraction_count=2)
    await source.start(listener)
    facts = listener.dumps[1].facts
    assert (facts.dump_id, facts.sequence) == ("boot1-0/req_1.safetensors", 1)
    assert facts.name == "boot1-0/req_1", "as the worker's answers call it"
    assert (facts.rid, facts.rows, facts.prefix_len, facts.prompt_len, facts.retraction_count) == ("rid", 5, 7, 12, 2)
    assert facts.nbytes == -(-path.stat().st_size // 4096) * 4096
    assert facts.token_ids == bytes(make_tensors(make_beacon(), 5)["token_ids"].data)


async def test_a_lost_capture_is_told_and_its_record_removed(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    publisher.publish_error("early", "no checksum")
    await source.start(listener)
    publisher.publish_error("late", "/dumps: No space left on device")
    await listener.wait(CaptureLost, 2)
    assert listener.of(CaptureLost) == [
        CaptureLost("early", "no checksum"),
        CaptureLost("late", "/dumps: No space left on device", for_want_of_room=True),
    ]
    assert list(publisher.directory.glob("*.error.json")) == []


async def test_a_record_that_counts_says_so(root: Path, source: PluginDumpSource, listener: Listener) -> None:
    publisher = DumpPublisher(root, "worker", make_beacon(), max_error_records=1)
    for rid in ("a", "b", "c"):
        publisher.publish_error(rid, "why")
    await source.start(listener)
    assert [lost.rid for lost in listener.of(CaptureLost)] == ["a", "c"]
    assert "the last of 2 lost captures" in listener.of(CaptureLost)[1].reason
    publisher.close()


async def test_captures_and_losses_come_in_the_counters_order(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    for number in range(6):
        publish(publisher, str(number))
        publisher.publish_error(str(number), "why")
    await source.start(listener)
    kinds = [type(event) for event in listener.events]
    assert kinds == [TapSeen, *[DumpSeen, CaptureLost] * 6]


def plant(path: Path, what: str) -> None:
    match what:
        case "garbage":
            path.write_bytes(b"\xff" * 5000)
        case "empty":
            path.touch()
        case "link":
            path.symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()


@pytest.mark.parametrize("name", ["req_5.safetensors", "req_5.error.json"])
@pytest.mark.parametrize("what", ["garbage", "empty", "link", "pipe"])
async def test_malformed_files_are_rejected_and_removed(
    source: PluginDumpSource, tap: Publish, listener: Listener, name: str, what: str
) -> None:
    publisher = tap()
    plant(publisher.directory / name, what)
    await source.start(listener)
    (early,) = listener.of(DumpRejected)
    assert early.name == f"boot1-0/{name}"
    plant(publisher.directory / f".{name}", what)
    (publisher.directory / f".{name}").rename(publisher.directory / name)
    await listener.wait(DumpRejected, 2)
    assert not os.path.lexists(publisher.directory / name)
    assert not listener.dumps
    publish(publisher)
    await listener.wait(DumpSeen, 1)


async def test_what_cannot_be_removed_is_rejected_once(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    plant(publisher.directory / "req_5.safetensors", "directory")
    await source.start(listener)
    await source.rescan()
    (rejected,) = listener.of(DumpRejected)
    assert "could not be removed" in rejected.reason


async def test_a_dump_of_another_boot_is_rejected(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    other = tap(boot_id="boot2")
    path = publish(other, boot_id="boot2")
    path.rename(tap().directory / "req_0.safetensors")
    await source.start(listener)
    (rejected,) = listener.of(DumpRejected)
    assert "boot 'boot2'" in rejected.reason
    assert not listener.dumps


@pytest.mark.parametrize("text", ["{}", "garbage", "of another tap"])
async def test_an_invalid_beacon_is_rejected_once_and_left(
    source: PluginDumpSource, tap: Publish, listener: Listener, text: str
) -> None:
    publisher = tap()
    if text == "of another tap":
        make_beacon(dp_rank=1).write(publisher.directory)
    else:
        (publisher.directory / "tap.json").write_text(text)
    await source.start(listener)
    await source.rescan()
    publisher.close()
    (publisher.directory / "foreign").touch()  # keeps the dead tap's directory
    await source.rescan()
    assert [event.name for event in listener.of(DumpRejected)] == ["boot1-0/tap.json", "boot1-0/foreign"]
    assert not listener.of(TapSeen)
    assert (publisher.directory / "tap.json").exists()


async def test_foreign_files_are_reported_once_and_left_alone(
    root: Path, source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    publisher = tap(announced=False)
    publisher.announce()
    foreign = [
        publisher.directory / "notes.txt",
        publisher.directory / "req_01.safetensors",
        root / "worker" / "stray",
        root / "worker" / "boot9-0",
    ]
    for path in foreign[:3]:
        path.touch()
    foreign[3].symlink_to(publisher.directory)
    (publisher.directory / ".hidden").touch()
    (root / "worker" / ".hidden").touch()
    await source.start(listener)
    await source.rescan()
    names = sorted(event.name for event in listener.of(DumpRejected))
    assert names == ["boot1-0/notes.txt", "boot1-0/req_01.safetensors", "boot9-0", "stray"]
    assert all(os.path.lexists(path) for path in foreign)
    assert len(listener.of(TapSeen)) == 1


async def test_a_dump_that_vanishes_is_forgotten(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    path = publish(publisher)
    await source.start(listener)
    path.unlink()
    await source.rescan()
    listener.dumps[0].release()
    assert listener.of(DumpRejected) == []


async def test_a_full_event_queue_leads_to_a_rescan(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap()
    await source.start(listener)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"fs.inotify.max_queued_events is {limit}: filling it takes too long")
    first, second = publisher.directory / ".a", publisher.directory / ".b"
    first.touch()
    for _ in range(limit // 2 + 8):  # the loop does not run meanwhile, and equal events next to each other would be merged
        first.rename(second)
        second.rename(first)
    for number in range(3):
        publish(publisher, str(number))
    await listener.wait(DumpSeen, 3)
    assert rids(listener) == ["0", "1", "2"]
    publish(publisher, "3")
    await listener.wait(DumpSeen, 4)
    await source.rescan()
    assert rids(listener) == ["0", "1", "2", "3"]


async def test_the_periodic_rescan_finds_what_no_event_told(
    source: PluginDumpSource, tap: Publish, listener: Listener, clock: HandClock
) -> None:
    publisher = tap(announced=False)
    publisher.announce()
    await source.start(listener)
    publisher.close()  # nobody is told of that
    await asyncio.sleep(0)
    clock.advance(29)
    await asyncio.sleep(0)
    assert len(listener.of(TapSeen)) == 1
    clock.advance(2)
    await listener.wait(TapSeen, 2)
    assert not listener.of(TapSeen)[1].alive


async def test_a_worker_directory_that_was_removed_is_made_anew(
    root: Path, source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    await source.start(listener)
    (root / "worker").rmdir()
    await source.rescan()
    publish(tap())
    await listener.wait(DumpSeen, 1)


async def test_directories_are_made_private_or_refused(root: Path, source: PluginDumpSource, listener: Listener) -> None:
    await source.start(listener)
    assert (root.stat().st_mode & 0o777, (root / "worker").stat().st_mode & 0o777) == (0o700, 0o700)
    (root / "worker").chmod(0o750)
    with pytest.raises(DumpSourceError, match="chmod 700"):
        await source.rescan()
    second = PluginDumpSource(root, "worker", clock=HandClock())
    with pytest.raises(DumpSourceError, match="chmod 700"):
        await second.start(listener)


async def test_a_root_behind_a_symbolic_link_is_refused(root: Path, source: PluginDumpSource, listener: Listener) -> None:
    (root.parent / "real").mkdir(mode=0o700)
    root.symlink_to(root.parent / "real")
    with pytest.raises(DumpSourceError, match="symbolic link"):
        await source.start(listener)


async def test_a_periodic_rescan_that_fails_is_told(
    root: Path, source: PluginDumpSource, listener: Listener, clock: HandClock
) -> None:
    await source.start(listener)
    (root / "worker").chmod(0o755)
    await asyncio.sleep(0)
    clock.advance(31)
    (rejected,) = await listener.wait(DumpRejected, 1)
    assert "chmod 700" in rejected.reason


async def test_more_dumps_than_open_files(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    publisher = tap()
    for _ in range(100):
        publish(publisher, rows=1)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        await source.start(listener)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(listener.dumps) == 100


async def test_a_listener_that_raises_is_not_silence(source: PluginDumpSource, tap: Publish) -> None:
    raised = asyncio.Event()

    def post(event: object) -> None:
        if isinstance(event, DumpSeen):
            raised.set()
            raise RuntimeError("a bug")  # noqa: TRY004 (not about a type)

    publisher = tap()
    await source.start(post)
    publish(publisher)
    await raised.wait()
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="a bug"):
        await source.rescan()
    with pytest.raises(RuntimeError, match="a bug"):
        await source.close()


async def test_a_publisher_whose_directory_is_swept_while_it_opens_makes_it_anew(
    root: Path, source: PluginDumpSource, listener: Listener
) -> None:
    await source.start(listener)
    (root / "worker" / "boot1-0").mkdir(mode=0o700)  # made, not locked yet
    await source.rescan()
    os.close(lock_tap(root / "worker" / "boot1-0"))
    assert listener.events == []


async def test_what_comes_while_it_closes_is_left_to_the_next_start(source, tap, listener) -> None:
    publisher = tap()
    await source.start(listener)
    await asyncio.sleep(0)
    publish(publisher, "x")
    publisher.publish_error("y", "no room")
    await source.close()
    await asyncio.sleep(0.02)
    assert len(list(publisher.directory.glob("req_*"))) == 2
    again = Listener()
    await source.start(again)
    await again.wait(CaptureLost, 1)
    assert [dump.facts.rid for dump in (*listener.dumps, *again.dumps)] == ["x"]
    assert [loss.rid for loss in (*listener.of(CaptureLost), *again.of(CaptureLost))] == ["y"]


async def test_more_than_is_kept_in_mind_is_found_by_a_look_at_everything(source, tap, listener, monkeypatch) -> None:
    monkeypatch.setattr(plugin, "MOST_NOTICED", 3)
    publisher = tap()
    await source.start(listener)
    for number in range(20):
        publish(publisher, str(number))
    await listener.wait(DumpSeen, 20)
    assert sorted(dump.facts.rid for dump in listener.dumps) == sorted(map(str, range(20)))
