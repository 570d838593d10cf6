"""A worker whose captures fail, and what a test asks of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from statetap.core.worker import WorkerState
from statetap.ports import GenerateSample, TapSeen

from tests.fakes.harness import TAP, FakeWorker, World

# Failing workers fail at once in these tests: a longer back-off would only be waited for.
SETTINGS = {"quarantine_seconds": 30.0, "retry_backoff_seconds": 1.0}


class BadWorker(FakeWorker):
    """A worker whose every dump has other token ids while it `is_bad`; also those of `bad_lengths`."""

    def __init__(self, name: str, *, is_bad: bool = True, bad_lengths: Collection[int] = (), tap: TapSeen = TAP) -> None:
        super().__init__(name, tap)
        self.is_bad = is_bad
        self.bad_lengths = bad_lengths
        self.publish = self.publish_as_it_is

    def publish_as_it_is(self, sample: GenerateSample) -> None:
        if not self.is_bad and len(sample.token_ids) not in self.bad_lengths:
            self.put(sample)
            return
        dump = self.put(sample, noticed=False)
        dump.facts = replace(dump.facts, token_ids=b"\0" * 4 * len(sample.token_ids))
        self.source._post_dumps([dump])


def state(world: World, name: str) -> WorkerState:
    (view,) = [view for view in world.pool.list() if view.record.name == name]
    return view.state


def reason(world: World, name: str) -> Any:
    (view,) = [view for view in world.pool.list() if view.record.name == name]
    return view.reason


def times(world: World, event: str) -> int:
    return len(world.logged(event))
