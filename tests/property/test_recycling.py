"""Any order of publishing, releasing, reading on, tidying and disturbing: what is published is right, and the budget holds.

The model: dumps by name with the seed of their bytes, and readers that hold on to the bytes of dumps that may be released.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from statetap_sglang.format import TensorView
from statetap_sglang.free_files import hand_back, remove_idle
from statetap_sglang.publisher import DumpPublisher, PublishError
from statetap_sglang.reader import open_dump
from statetap_sglang.tap import FREE_DIRECTORY

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

PAGE = 4096
BUDGET = 40 * PAGE
BEACON = make_beacon(recycle_from_bytes=1, budget_bytes=BUDGET)
SIZES = st.integers(1, 90)


class Recycling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.publisher = DumpPublisher(self.root / "dumps", "worker", BEACON)
        self.published: dict[Path, dict[str, TensorView]] = {}
        self.readers: list[tuple[dict[str, memoryview], dict[str, TensorView]]] = []
        self.seen: frozenset[str] = frozenset()
        self.seed = 0

    @property
    def tap(self) -> Path:
        return self.publisher.directory

    @rule(rows=SIZES)
    def publish(self, rows: int) -> None:
        self.seed += 1
        tensors = make_tensors(BEACON, rows, self.seed)
        dumps_alone = self._held(self.published)
        try:
            name = self.publisher.publish(make_metadata("rid", rows), tensors)
        except PublishError as error:
            (needed,) = re.findall(r"(\d+) bytes are over the tap's budget", error.reason)
            if dumps_alone + int(needed) <= BUDGET:
                raise AssertionError("refused although free files could have made room") from error
        else:
            self.published[self.tap / name] = tensors

    @rule(which=st.integers(0, 100), recycled=st.booleans())
    def release(self, which: int, recycled: bool) -> None:
        if self.published:
            path = list(self.published)[which % len(self.published)]
            del self.published[path]
            if recycled:
                hand_back(path, 1)
            else:
                path.unlink()

    @rule(which=st.integers(0, 100))
    def read_on(self, which: int) -> None:
        if self.published:
            path = list(self.published)[which % len(self.published)]
            with open_dump(path) as dump:
                self.readers.append(({name: tensor.data for name, tensor in dump.tensors.items()}, self.published[path]))

    @rule()
    def stop_reading(self) -> None:
        self.readers.clear()

    @rule()
    def tidy(self) -> None:
        self.seen = remove_idle(self.tap, self.seen)

    @rule()
    def remove_the_folder(self) -> None:
        shutil.rmtree(self.tap / FREE_DIRECTORY, ignore_errors=True)

    @rule()
    def kill(self) -> None:
        """The publisher dies, and another one of the same boot opens the tap."""
        assert self.publisher._lock is not None
        os.close(self.publisher._lock)
        self.publisher._lock = None
        self.publisher = DumpPublisher(self.root / "dumps", "worker", BEACON)

    @invariant()
    def dumps_are_right(self) -> None:
        for path, tensors in self.published.items():
            with open_dump(path) as dump:
                assert same({name: tensor.data for name, tensor in dump.tensors.items()}, tensors)

    @invariant()
    def readers_are_not_disturbed(self) -> None:
        assert all(same(views, tensors) for views, tensors in self.readers)

    @invariant()
    def the_budget_holds(self) -> None:
        assert self._held(path for path in self.tap.rglob("*") if path.name != ".next") <= BUDGET

    def teardown(self) -> None:
        self.readers.clear()
        self.publisher.close()
        left = {path.name for path in self.tap.iterdir()} - {".next"}
        shutil.rmtree(self.root)
        assert left == {path.name for path in self.published}

    @staticmethod
    def _held(paths: Iterable[Path]) -> int:
        return sum(path.stat().st_blocks * 512 for path in paths if path.is_file())


def same(views: dict[str, memoryview], tensors: dict[str, TensorView]) -> bool:
    return views.keys() == tensors.keys() and all(np.array_equal(views[name], tensors[name].data) for name in tensors)


TestRecycling = Recycling.TestCase
TestRecycling.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
