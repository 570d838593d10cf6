"""Places for dumps (a tmpfs directory and one on disk), taps in them, a clock and a listener."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from statetap.adapters.dumps import PluginDumpSource
from statetap_sglang.publisher import DumpPublisher

from tests.fakes.clock import HandClock
from tests.fakes.dumps import Listener, make_beacon


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["tmpfs", "disk"])
def root(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    """A dump root that does not exist yet."""
    return (shm if request.param == "tmpfs" else tmp_path) / "dumps"


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
def tap(root: Path) -> Iterator[Callable[..., DumpPublisher]]:
    """Opens taps, announced ones unless told otherwise, and closes them all at the end."""
    opened: list[DumpPublisher] = []

    def open_tap(*, announced: bool = True, **beacon: Any) -> DumpPublisher:
        opened.append(DumpPublisher(root, "worker", make_beacon(**beacon)))
        if announced:
            opened[-1].announce()
        return opened[-1]

    yield open_tap
    for publisher in opened:
        publisher.close()


@pytest.fixture
async def source(root: Path, clock: HandClock) -> AsyncIterator[PluginDumpSource]:
    source = PluginDumpSource(root, "worker", clock=clock)
    yield source
    await source.close()
