"""Taps come, say what they capture or why they do not, and go; their dumps and directories with them."""

from __future__ import annotations

from statetap.adapters.dumps import PluginDumpSource
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.ports import DumpRejected, DumpSeen, TapRefused, TapSeen
from statetap_sglang.format import REFUSAL_NAME
from statetap_sglang.refusal import Refusal

from tests.fakes.dumps import Listener, Publish, make_beacon, publish


def rids(listener: Listener) -> list[str]:
    return [dump.facts.rid for dump in listener.dumps]


async def test_a_tap_says_what_it_captures(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    tap(announced=False, dp_rank=1, dp_size=2, chunked_prefill_size=64).announce()
    await source.start(listener)
    assert listener.events == [
        TapSeen(
            tap="boot1-1",
            capture=CaptureSpec((1, 3), Final.BOTH),
            model=ModelFacts("org/model", "fingerprint", 8, 48, 1000, "bfloat16"),
            identity=Identity.TOKENS,
            budget_bytes=1 << 30,
            context_length=4096,
            chunked_prefill_size=64,
            alive=True,
            boot="boot1",
            dp_rank=1,
            dp_size=2,
        )
    ]


async def test_a_later_boot_was_announced_later(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    tap(boot_id="b")
    tap(boot_id="a")
    await source.start(listener)
    by_name = {seen.boot: seen.announced_ns for seen in listener.of(TapSeen)}
    assert by_name["a"] > by_name["b"]


async def test_a_tap_that_refuses_to_publish_says_why(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    await source.start(listener)
    publisher = tap(announced=False)
    Refusal("SGLang 9.9 is unknown: set STATETAP_PLUGIN_FORCE=1", "0.1.0", "9.9").write(publisher.directory)
    (refused,) = await listener.wait(TapRefused, 1)
    assert (refused.tap, refused.boot, refused.alive) == ("boot1-0", "boot1", True)
    assert refused.reason == "SGLang 9.9 is unknown: set STATETAP_PLUGIN_FORCE=1"
    assert refused.announced_ns > 0
    await source.rescan()
    assert len(listener.events) == 1


async def test_a_refusal_that_cannot_be_read_is_one_all_the_same(
    source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    (tap(announced=False).directory / REFUSAL_NAME).write_text("{")
    await source.start(listener)
    (refused,) = listener.of(TapRefused)
    assert refused.reason.startswith("refused.json cannot be read: ")


async def test_a_refusals_process_ends_and_its_directory_goes(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(announced=False)
    Refusal("no", "0.1.0", "9.9").write(publisher.directory)
    await source.start(listener)
    publisher.close()
    await source.rescan()
    assert [refused.alive for refused in listener.of(TapRefused)] == [True, False]
    assert not publisher.directory.exists()


async def test_a_refusal_of_a_dead_boot_is_nobodys_business(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(announced=False)
    Refusal("no", "0.1.0", "9.9").write(publisher.directory)
    publisher.close()
    await source.start(listener)
    assert listener.events == []
    assert not publisher.directory.exists()


async def test_a_tap_that_comes_later(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    await source.start(listener)
    publisher = tap(announced=False, boot_id="boot2", dp_rank=3)
    publish(publisher, "before the beacon", boot_id="boot2")
    await source.rescan()
    assert not listener.events, "nobody can say yet what is in that dump"
    publisher.announce()
    (seen,) = await listener.wait(TapSeen, 1)
    assert (seen.tap, seen.alive) == ("boot2-3", True)
    publish(publisher, "after it", boot_id="boot2")
    await listener.wait(DumpSeen, 2)
    assert rids(listener) == ["before the beacon", "after it"]


async def test_a_tap_and_its_dumps_that_came_before_the_watch(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    await source.start(listener)
    publisher = tap(announced=False)
    for number in range(12):
        publish(publisher, str(number))
    publisher.announce()  # the loop has not run since: one event of the directory stands for all
    await listener.wait(DumpSeen, 12)
    assert isinstance(listener.events[0], TapSeen)
    assert rids(listener) == [str(number) for number in range(12)]


async def test_a_beacon_that_is_replaced_is_posted_again(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(announced=False)
    publisher.announce()
    await source.start(listener)
    await source.rescan()
    make_beacon(context_length=77).write(publisher.directory)
    await listener.wait(TapSeen, 2)
    await source.rescan()
    assert [seen.context_length for seen in listener.of(TapSeen)] == [4096, 77]


async def test_a_dead_boots_dumps_are_posted_and_its_directory_goes_with_them(
    source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    dead, live = tap(announced=False), tap(announced=False, boot_id="boot2")
    dead.announce()
    live.announce()
    publish(dead)
    dead.close()
    (dead.directory / ".req_7.safetensors").write_bytes(b"half")
    await source.start(listener)
    assert [(seen.tap, seen.alive) for seen in listener.of(TapSeen)] == [("boot1-0", False), ("boot2-0", True)]
    assert [path.name for path in dead.directory.glob("*req*")] == ["req_0.safetensors"]
    listener.dumps[0].release()
    assert dead.directory.exists()
    await source.rescan()
    assert not dead.directory.exists()
    assert live.directory.exists()
    assert listener.of(DumpRejected) == []


async def test_a_dead_boot_without_dumps_goes_without_a_word(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(announced=False)
    publisher.announce()
    publisher.close()
    await source.start(listener)
    assert listener.events == []
    assert not publisher.directory.exists()


async def test_a_publishers_death_is_noticed_by_a_rescan(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    publisher = tap(announced=False)
    publisher.announce()
    await source.start(listener)
    publish(publisher)
    publisher.close()
    await source.rescan()
    assert [seen.alive for seen in listener.of(TapSeen)] == [True, False]
    assert rids(listener) == ["rid"]
