"""What every dump source promises, whatever is behind it: the fake, plugin dumps on tmpfs and on disk, plain dumps."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from statetap.adapters.dumps import PlainDumpSource, PluginDumpSource
from statetap.core.dumps import DumpFacts
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.ports import DumpSeen, DumpSource, DumpSourceError, TapSeen
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import ROW_CHECKSUMS, TensorView, dump_number
from statetap_sglang.plain import PlainLayout, PlainPublisher, plain_number
from statetap_sglang.publisher import DumpPublisher

from tests.fakes.clock import HandClock
from tests.fakes.dumps import FakeDumpSource, Listener, hidden_only, make_beacon, make_metadata, make_tensors

MODEL = ModelFacts("org/model", "fingerprint", 8, 48, 1000, "bfloat16")
SPEC = CaptureSpec((1, 3), Final.BOTH)
ROW_SHAPES = {array.name: array.row_shape for array in SPEC.hidden_arrays(MODEL)}


def tap_seen(tap: str, identity: Identity) -> TapSeen:
    return TapSeen(tap, SPEC, MODEL, identity, 1 << 30, 4096, None, alive=True)


def checksums_of(tensors: Mapping[str, TensorView]) -> bytes:
    return row_checksums(tensors).tobytes()


class Setting(ABC):
    """A dump directory, somebody who publishes into it, and sources that watch it."""

    def __init__(self) -> None:
        self.published = 0

    def publish(self, rows: int) -> dict[str, bytes]:
        """Publish one dump; its hidden tensors' bytes."""
        self.published += 1
        return self._publish(rows, self.published)

    @abstractmethod
    def _publish(self, rows: int, seed: int) -> dict[str, bytes]: ...

    @abstractmethod
    def source(self) -> DumpSource: ...

    @abstractmethod
    def visible(self) -> int:
        """How many dumps are in the directory."""

    def close(self) -> None:  # noqa: B027 (not every setting has something to end)
        """End the publisher."""


class FakeSetting(Setting):
    def __init__(self) -> None:
        super().__init__()
        self._source = FakeDumpSource()
        self._source.announce(tap_seen("tap", Identity.TOKENS))

    def _publish(self, rows: int, seed: int) -> dict[str, bytes]:
        tensors = hidden_only(make_tensors(make_beacon(), rows, seed))
        views = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        shapes = tuple((name, "bfloat16", tensor.shape) for name, tensor in tensors.items())
        nbytes = -(-sum(map(len, views.values())) // 4096) * 4096
        tap = tap_seen("tap", Identity.TOKENS)
        facts = DumpFacts(
            dump_id=f"tap/{seed}",
            sequence=seed,
            rows=rows,
            nbytes=nbytes,
            tensors=shapes,
            capture=tap.capture,
            model_fingerprint=tap.model.model_fingerprint,
        )
        self._source.put(facts, views, checksums_of(tensors))
        return views

    def source(self) -> DumpSource:
        return self._source

    def visible(self) -> int:
        return len(self._source.held)


class PluginSetting(Setting):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._beacon = make_beacon()
        self._publisher = DumpPublisher(root, "worker", self._beacon)
        self._publisher.announce()

    def _publish(self, rows: int, seed: int) -> dict[str, bytes]:
        tensors = make_tensors(self._beacon, rows, seed)
        summed = {ROW_CHECKSUMS: TensorView("I64", (rows,), memoryview(checksums_of(tensors)))}
        self._publisher.publish(make_metadata(f"rid-{seed}", rows), tensors | summed)
        return {name: bytes(tensor.data) for name, tensor in hidden_only(tensors).items()}

    def source(self) -> DumpSource:
        return PluginDumpSource(self._root, "worker", clock=HandClock())

    def visible(self) -> int:
        return sum(dump_number(path.name) is not None for path in self._publisher.directory.iterdir())

    def close(self) -> None:
        self._publisher.close()


class PlainSetting(Setting):
    def __init__(self, directory: Path, kind: str, published_by: str) -> None:
        super().__init__()
        self._directory = directory
        self._layout = PlainLayout.default(aux_layers=2, final="both", kind=kind, published_by=published_by)
        self._publisher = PlainPublisher(directory, self._layout)

    def _publish(self, rows: int, seed: int) -> dict[str, bytes]:
        tensors = hidden_only(make_tensors(make_beacon(), rows, seed))
        self._publisher.publish(tensors)
        return {name: bytes(tensor.data) for name, tensor in tensors.items()}

    def source(self) -> DumpSource:
        return PlainDumpSource(self._directory, self._layout, tap_seen("plain", Identity.COUNT), clock=HandClock())

    def visible(self) -> int:
        return sum(plain_number(path.name) is not None for path in self._directory.iterdir())


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(
    params=["fake", "plugin-tmpfs", "plugin-disk", "safetensors-rename", "safetensors-DONE", "pt-rename", "pt-meta.json"]
)
def setting(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Iterator[Setting]:
    match request.param.split("-"):
        case ["fake"]:
            made: Setting = FakeSetting()
        case ["plugin", where]:
            made = PluginSetting((shm if where == "tmpfs" else tmp_path) / "dumps")
        case [kind, published_by]:
            made = PlainSetting(shm / "dumps", kind, published_by)
    yield made
    made.close()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
async def source(setting: Setting) -> AsyncIterator[DumpSource]:
    source = setting.source()
    yield source
    await source.close()


async def test_what_was_there_comes_first_and_in_order(setting: Setting, source: DumpSource, listener: Listener) -> None:
    for rows in (3, 1, 40, 2, 7, 5, 9, 11, 4, 6, 8, 12):  # two digits: the counter's order is not the names'
        setting.publish(rows)
    await source.start(listener)
    assert isinstance(listener.events[0], TapSeen)
    assert listener.events[0].capture == SPEC
    assert listener.events[0].model == MODEL
    assert [dump.facts.rows for dump in listener.dumps] == [3, 1, 40, 2, 7, 5, 9, 11, 4, 6, 8, 12]


async def test_what_comes_is_posted_without_a_rescan(setting: Setting, source: DumpSource, listener: Listener) -> None:
    await source.start(listener)
    for rows in (5, 6, 7):
        setting.publish(rows)
    await listener.wait(DumpSeen, 3)
    assert [dump.facts.rows for dump in listener.dumps] == [5, 6, 7]


async def test_a_dump_is_posted_once(setting: Setting, source: DumpSource, listener: Listener) -> None:
    setting.publish(3)
    await source.start(listener)
    setting.publish(4)
    await source.rescan()  # finds it before its event is handled
    assert len(listener.dumps) == 2
    setting.publish(5)
    await listener.wait(DumpSeen, 3)
    await source.rescan()
    assert [dump.facts.rows for dump in listener.dumps] == [3, 4, 5]


async def test_facts_and_bits(setting: Setting, source: DumpSource, listener: Listener) -> None:
    first, second = setting.publish(5), setting.publish(300)
    await source.start(listener)
    for dump, published, rows in zip(listener.dumps, (first, second), (5, 300), strict=True):
        assert {name: bytes(view) for name, view in dump.views.items()} == published
        assert all(view.readonly and view.format == "B" for view in dump.views.values())
        assert {name: (dtype, shape) for name, dtype, shape in dump.facts.tensors} == {
            "aux_hidden_states": ("bfloat16", (rows, 2, 48)),
            "last_hidden_states": ("bfloat16", (rows, 48)),
            "last_hidden_states_prenorm": ("bfloat16", (rows, 48)),
        }
        assert dump.facts.rows == rows
        assert dump.facts.nbytes % 4096 == 0
        assert dump.facts.nbytes >= sum(map(len, published.values()))
    ids = [dump.facts.dump_id for dump in listener.dumps]
    assert len(set(ids)) == 2
    assert listener.dumps[0].facts.sequence < listener.dumps[1].facts.sequence


async def test_checksums_come_with_dumps_whose_publisher_takes_them(
    setting: Setting, source: DumpSource, listener: Listener
) -> None:
    published = setting.publish(5)
    await source.start(listener)
    (dump,) = listener.dumps
    if isinstance(setting, PlainSetting):
        assert dump.row_checksums is None
    else:
        tensors = {name: TensorView("BF16", (5, *ROW_SHAPES[name]), memoryview(data)) for name, data in published.items()}
        assert bytes(dump.row_checksums) == checksums_of(tensors)


async def test_release_removes_and_is_idempotent(setting: Setting, source: DumpSource, listener: Listener) -> None:
    setting.publish(3)
    published = setting.publish(4)
    await source.start(listener)
    released, kept = listener.dumps
    held_elsewhere = kept.views["last_hidden_states"]
    released.release()
    assert setting.visible() == 1
    released.release()
    assert setting.visible() == 1
    assert bytes(kept.views["aux_hidden_states"]) == published["aux_hidden_states"]
    kept.release()
    assert setting.visible() == 0
    assert bytes(held_elsewhere) == published["last_hidden_states"]
    await source.rescan()
    assert len(listener.dumps) == 2


async def test_what_was_not_released_is_there_after_a_restart(setting: Setting, source: DumpSource, listener: Listener) -> None:
    setting.publish(3)
    setting.publish(4)
    await source.start(listener)
    listener.dumps[0].release()
    await source.close()
    setting.publish(5)
    again, heard = setting.source(), Listener()
    try:
        await again.start(heard)
        assert isinstance(heard.events[0], TapSeen)
        assert [dump.facts.rows for dump in heard.dumps] == [4, 5]
    finally:
        await again.close()


async def test_nothing_is_posted_after_close(setting: Setting, source: DumpSource, listener: Listener) -> None:
    await source.start(listener)
    before = len(listener.events)
    await source.close()
    setting.publish(3)
    other, heard = setting.source(), Listener()
    await other.start(heard)
    await heard.wait(DumpSeen, 1)
    assert len(listener.events) == before
    await other.close()


async def test_a_directory_has_one_source(tmp_path: Path) -> None:
    """Two workers with one directory, in one service or in two, would take or release each other's dumps."""
    first = PluginDumpSource(tmp_path / "dumps", "w", clock=HandClock())
    second = PluginDumpSource(tmp_path / "dumps", "w", clock=HandClock())
    layout = PlainLayout.default(aux_layers=2, final="both")
    plain = PlainDumpSource(tmp_path / "dumps" / "w", layout, tap_seen("plain", Identity.COUNT), clock=HandClock())
    await first.start(lambda _: None)
    for other in (second, plain):
        with pytest.raises(DumpSourceError, match="a directory of its own"):
            await other.start(lambda _: None)
    await first.close()
    await second.start(lambda _: None)
    await second.close()
