"""Dumps for tests: a source in memory, and what it takes to publish real dumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from statetap.core.dumps import DumpFacts
from statetap.ports import CaptureLost, DumpEvent, DumpRejected, DumpSeen, DumpSourceError, TapRefused, TapSeen
from statetap_sglang.beacon import Beacon
from statetap_sglang.format import (
    AUX_HIDDEN_STATES,
    HIDDEN_TENSORS,
    ITEM_BYTES,
    LAST_HIDDEN_STATES,
    LAST_HIDDEN_STATES_PRENORM,
    MODEL_DTYPES,
    TOKEN_IDS,
    DumpMetadata,
    TensorView,
)
from statetap_sglang.publisher import DumpPublisher


class FakeDump:
    """A dump in memory; `released` says whether it was let go."""

    def __init__(
        self,
        facts: DumpFacts,
        views: Mapping[str, bytes | memoryview],
        row_checksums: bytes | None,
        on_release: Callable[[FakeDump], None],
    ) -> None:
        self.facts = facts
        self.views: Mapping[str, memoryview] = {name: memoryview(view).toreadonly() for name, view in views.items()}
        self.row_checksums = None if row_checksums is None else memoryview(row_checksums)
        self.released = False
        self._on_release = on_release

    def release(self) -> None:
        if not self.released:
            self.views = {}
            self._on_release(self)
            self.released = True


class FakeDumpSource:
    """A dump source over a directory that is only imagined: it outlives `close`, so starting again is a restart of the service.

    What is put while the source is closed is posted by `start`. `released` lists dump ids in the order of their release.
    Set `broken` to make `start` and `rescan` fail.
    """

    def __init__(self) -> None:
        self.released: list[str] = []
        self.broken: DumpSourceError | None = None
        self._post: Callable[[DumpEvent], None] | None = None
        self._taps: dict[tuple[str, type], TapSeen | TapRefused] = {}
        self._dumps: dict[str, FakeDump] = {}
        self._posted: set[str] = set()
        self._waiting: list[DumpEvent] = []

    @property
    def held(self) -> list[str]:
        """Ids of the dumps that are still in the directory."""
        return list(self._dumps)

    def announce(self, tap: TapSeen | TapRefused) -> None:
        self._taps[tap.tap, type(tap)] = tap
        if self._post is not None:
            self._post(tap)

    def put(
        self,
        facts: DumpFacts,
        views: Mapping[str, bytes | memoryview],
        row_checksums: bytes | None = None,
        *,
        noticed: bool = True,
    ) -> FakeDump:
        """Publish a dump. With `noticed=False` its event is lost, and only a rescan finds it."""
        dump = FakeDump(facts, views, row_checksums, self._forget)
        self._dumps[facts.dump_id] = dump
        if noticed:
            self._post_dumps([dump])
        return dump

    def lose(self, rid: str, reason: str, *, for_want_of_room: bool = False) -> None:
        self._post_or_keep(CaptureLost(rid, reason, for_want_of_room))

    def reject(self, name: str, reason: str) -> None:
        self._post_or_keep(DumpRejected(name, reason))

    async def start(self, post: Callable[[DumpEvent], None]) -> None:
        if self.broken is not None:
            raise self.broken
        self._post = post
        for tap in self._taps.values():
            post(tap)
        await self.rescan()
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            post(event)

    async def rescan(self) -> None:
        if self.broken is not None:
            raise self.broken
        self._post_dumps(sorted(self._dumps.values(), key=lambda dump: dump.facts.sequence))

    async def close(self) -> None:
        self._post = None
        self._posted.clear()

    def _post_dumps(self, dumps: list[FakeDump]) -> None:
        for dump in dumps:
            if self._post is not None and dump.facts.dump_id not in self._posted:
                self._posted.add(dump.facts.dump_id)
                self._post(DumpSeen(dump))

    def _post_or_keep(self, event: DumpEvent) -> None:
        if self._post is None:
            self._waiting.append(event)
        else:
            self._post(event)

    def _forget(self, dump: FakeDump) -> None:
        self._dumps.pop(dump.facts.dump_id, None)
        self._posted.discard(dump.facts.dump_id)
        self.released.append(dump.facts.dump_id)


class Listener:
    """Collects what a dump source posts, and lets a test wait for it."""

    def __init__(self) -> None:
        self.events: list[DumpEvent] = []
        self._more = asyncio.Event()

    def __call__(self, event: DumpEvent) -> None:
        self.events.append(event)
        self._more.set()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def dumps(self) -> list[Any]:
        return [event.dump for event in self.of(DumpSeen)]

    async def wait(self, kind: type, count: int, seconds: float = 20.0) -> list[Any]:
        """Wait until `count` events of a kind were posted."""
        async with asyncio.timeout(seconds):
            while len(self.of(kind)) < count:
                self._more.clear()
                await self._more.wait()
        return self.of(kind)


def make_beacon(**changes: Any) -> Beacon:
    """A beacon of a small model: 8 layers of width 48, layers 1 and 3 and both final states."""
    fields: dict[str, Any] = {
        "boot_id": "boot1",
        "dp_rank": 0,
        "plugin_version": "0.1.0",
        "sglang_version": "0.5.23",
        "model_path": "org/model",
        "model_fingerprint": "fingerprint",
        "num_layers": 8,
        "hidden_size": 48,
        "vocab_size": 1000,
        "aux_layer_ids": (1, 3),
        "final": "both",
        "dtype": "bfloat16",
        "tp_size": 1,
        "dp_size": 1,
        "pid": 1,
        "budget_bytes": 1 << 30,
        "radix_cache": False,
        "chunked_prefill_size": None,
        "context_length": 4096,
    }
    return Beacon(**(fields | changes))


def make_metadata(rid: str, rows: int, **changes: Any) -> DumpMetadata:
    return DumpMetadata(**({"boot_id": "boot1", "rid": rid, "prefix_len": 0, "extend_len": rows} | changes))


Publish = Callable[..., DumpPublisher]


def publish(publisher: DumpPublisher, rid: str = "rid", rows: int = 3, boot_id: str = "boot1", **changes: Any) -> Path:
    """Publish one dump of random rows; its path."""
    metadata = make_metadata(rid, rows, boot_id=boot_id, **changes)
    return publisher.directory / publisher.publish(metadata, make_tensors(make_beacon(), rows))


def random_tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> TensorView:
    """Random bytes: dumps carry bits, whatever they mean."""
    nbytes = ITEM_BYTES[dtype] * int(np.prod(shape))
    return TensorView(dtype, shape, memoryview(rng.bytes(nbytes)))


def make_tensors(beacon: Beacon, rows: int, seed: int = 0) -> dict[str, TensorView]:
    """Random tensors of `rows` rows as the beacon's tap publishes them, token ids included."""
    rng = np.random.default_rng(seed)
    dtype, width = MODEL_DTYPES[beacon.dtype], beacon.hidden_size
    tensors = {TOKEN_IDS: TensorView("I32", (rows,), rng.integers(0, beacon.vocab_size, rows, dtype=np.int32).data.cast("B"))}
    if beacon.aux_layer_ids:
        tensors[AUX_HIDDEN_STATES] = random_tensor(rng, dtype, (rows, len(beacon.aux_layer_ids), width))
    if beacon.final in ("post_norm", "both"):
        tensors[LAST_HIDDEN_STATES] = random_tensor(rng, dtype, (rows, width))
    if beacon.final in ("pre_norm", "both"):
        tensors[LAST_HIDDEN_STATES_PRENORM] = random_tensor(rng, dtype, (rows, width))
    return tensors


def hidden_only(tensors: Mapping[str, TensorView]) -> dict[str, TensorView]:
    return {name: tensor for name, tensor in tensors.items() if name in HIDDEN_TENSORS}
