from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from asyncinotify import Mask
from statetap.adapters.dumps import PlainDumpSource
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.ports import DumpRejected, DumpSeen, DumpSourceError, TapSeen
from statetap_sglang.plain import PlainLayout, PlainPublisher

from tests.fakes.clock import HandClock
from tests.fakes.dumps import Listener, hidden_only, make_beacon, make_tensors

MODEL = ModelFacts("org/model", "fingerprint", 8, 48, 1000, "bfloat16")
TAP = TapSeen("plain", CaptureSpec((1, 3), Final.BOTH), MODEL, Identity.COUNT, 1 << 30, 4096, 64, alive=True)


def layout(published_by: str = "rename", kind: str = "safetensors") -> PlainLayout:
    return PlainLayout.default(aux_layers=2, final="both", kind=kind, published_by=published_by)


def publish(root: Path, rows: int = 3, published_by: str = "rename") -> Path:
    return root / PlainPublisher(root, layout(published_by)).publish(hidden_only(make_tensors(make_beacon(), rows)))


@pytest.fixture
async def source(root: Path, clock: HandClock) -> AsyncIterator[PlainDumpSource]:
    source = PlainDumpSource(root, layout(), TAP, clock=clock)
    yield source
    await source.close()


@pytest.fixture
async def marked(root: Path, clock: HandClock) -> AsyncIterator[PlainDumpSource]:
    """A source of dumps that are complete once DONE is there."""
    source = PlainDumpSource(root, layout("DONE"), TAP, clock=clock, torn_after_seconds=60)
    yield source
    await source.close()


async def test_facts_of_a_dump(root: Path, source: PlainDumpSource, listener: Listener) -> None:
    publish(root)
    path = publish(root, 5)
    await source.start(listener)
    assert listener.events[0] is TAP
    facts = listener.dumps[1].facts
    assert (facts.dump_id, facts.sequence, facts.rows) == ("plain/req_1", 1, 5)
    assert (facts.rid, facts.token_ids, facts.prompt_len) == (None, None, None)
    assert facts.nbytes == sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir())


@pytest.mark.parametrize("moment", ["before the start", "before the watch", "after the watch"])
async def test_a_directory_is_posted_when_its_last_file_comes(
    root: Path, marked: PlainDumpSource, listener: Listener, moment: str
) -> None:
    hidden = publish(root, published_by="DONE").rename(root / ".aside")
    path = root / "req_0"
    if moment != "before the start":
        await marked.start(listener)
    path.mkdir()
    (hidden / "hidden_states.safetensors").rename(path / "hidden_states.safetensors")
    if moment == "after the watch":
        await marked.rescan()
        assert not listener.dumps
    (hidden / "DONE").rename(path / "DONE")
    if moment == "before the start":
        await marked.start(listener)
    await listener.wait(DumpSeen, 1)
    await marked.rescan()
    assert len(listener.dumps) == 1
    assert listener.of(DumpRejected) == []


async def test_a_last_file_that_comes_just_before_the_watch(root: Path, clock: HandClock, listener: Listener) -> None:
    class Late(PlainDumpSource):
        def _watch(self, directory: Path, mask: Mask) -> None:
            if directory != root:
                (directory / "DONE").touch()
            super()._watch(directory, mask)

    (publish(root, published_by="DONE") / "DONE").unlink()
    source = Late(root, layout("DONE"), TAP, clock=clock)
    await source.start(listener)
    assert len(listener.dumps) == 1
    await source.close()


async def test_a_torn_dump_is_reported_once_and_removed(
    root: Path, marked: PlainDumpSource, listener: Listener, clock: HandClock
) -> None:
    path = publish(root, published_by="DONE")
    (path / "DONE").unlink()
    await marked.start(listener)
    clock.advance(59)
    await marked.rescan()
    assert path.exists()
    assert listener.of(DumpRejected) == []
    clock.advance(1)
    await marked.rescan()
    await marked.rescan()
    (torn,) = listener.of(DumpRejected)
    assert torn.name == "plain/req_0"
    assert "torn: DONE has not come within 60 s" in torn.reason
    assert list(root.iterdir()) == []
    assert not listener.dumps


async def test_an_incomplete_directory_that_vanishes_is_forgotten(
    root: Path, marked: PlainDumpSource, listener: Listener, clock: HandClock
) -> None:
    (root / "req_0").mkdir(parents=True)
    root.chmod(0o700)
    await marked.start(listener)
    (root / "req_0").rmdir()
    await marked.rescan()
    clock.advance(100)
    (root / "req_0").mkdir()
    await marked.rescan()
    assert listener.events == [TAP]


async def test_a_server_that_counts_anew(root: Path, source: PlainDumpSource, listener: Listener) -> None:
    await source.start(listener)
    for rows in (3, 4, 5):
        assert publish(root, rows).name == "req_0"
        await listener.wait(DumpSeen, rows - 2)
        listener.dumps[-1].release()
    assert [dump.facts.rows for dump in listener.dumps] == [3, 4, 5]


async def test_another_dump_of_a_known_name_is_found_without_its_event(
    root: Path, source: PlainDumpSource, listener: Listener
) -> None:
    first = publish(root, 3)
    await source.start(listener)
    first.rename(root / ".aside")
    assert publish(root, 5) == first
    await source.rescan()
    assert [dump.facts.rows for dump in listener.dumps] == [3, 5]


async def test_a_dump_taken_away_by_others_and_another_of_its_name(
    root: Path, source: PlainDumpSource, listener: Listener
) -> None:
    await source.start(listener)
    first = publish(root, 3)
    await listener.wait(DumpSeen, 1)
    kept = first.rename(root / ".kept")  # its inode is not free for the next one
    publish(root, 4)
    await listener.wait(DumpSeen, 2)
    listener.dumps[1].release()
    assert [path.name for path in root.iterdir()] == [kept.name]


@pytest.mark.parametrize("what", ["nothing inside", "garbage", "file", "link", "link inside"])
async def test_malformed_dumps_are_rejected_and_removed(
    root: Path, source: PlainDumpSource, listener: Listener, tmp_path: Path, what: str
) -> None:
    await source.start(listener)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "hidden_states.safetensors").write_text("precious")
    made = root / ".made"
    match what:
        case "file":
            made.touch()
        case "link":
            made.symlink_to(precious)
        case _:
            made.mkdir()
    if what == "garbage":
        (made / "hidden_states.safetensors").write_bytes(b"\xff" * 100)
    if what == "link inside":
        (made / "hidden_states.safetensors").symlink_to(precious / "hidden_states.safetensors")
    made.rename(root / "req_0")
    (rejected,) = await listener.wait(DumpRejected, 1)
    assert rejected.name == "plain/req_0"
    assert list(root.iterdir()) == []
    assert (precious / "hidden_states.safetensors").read_text() == "precious"


async def test_foreign_files_are_reported_once_and_left_alone(root: Path, source: PlainDumpSource, listener: Listener) -> None:
    publish(root)
    for name in ("README", "req_x", ".req_7.tmp"):
        (root / name).mkdir()
    await source.start(listener)
    await source.rescan()
    assert sorted(event.name for event in listener.of(DumpRejected)) == ["plain/README", "plain/req_x"]
    assert (root / ".req_7.tmp").exists()
    assert len(listener.dumps) == 1


async def test_a_removal_that_was_cut_short_is_finished(root: Path, source: PlainDumpSource, listener: Listener) -> None:
    publish(root).rename(root / ".req_0.removed")
    await source.start(listener)
    assert listener.events == [TAP]
    assert list(root.iterdir()) == []


async def test_a_directory_open_to_others_is_refused(root: Path, source: PlainDumpSource, listener: Listener) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(DumpSourceError, match="chmod 700"):
        await source.start(listener)


@pytest.mark.parametrize(
    "wrong", [{"aux_layers": 3, "final": "both"}, {"aux_layers": 2, "final": "post_norm"}, {"aux_layers": 0, "final": "both"}]
)
def test_a_layout_must_be_the_capture_specs(root: Path, clock: HandClock, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="make them agree"):
        PlainDumpSource(root, PlainLayout.default(**wrong), TAP, clock=clock)
    assert not os.path.lexists(root)
