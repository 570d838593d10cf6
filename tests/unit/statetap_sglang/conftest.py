"""Places for dumps (a tmpfs directory and one on disk), and stub servers with the plugin."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.landing_tap import Tap
from tests.fakes.served_plugin import Serve, Served
from tests.fakes.sglang_stub import StubModel, stubbed_sglang


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
def serve(shm: Path) -> Iterator[Serve]:
    opened: list[Served] = []
    with stubbed_sglang() as module:

        def serve(model: StubModel | None = None, *, arguments: dict[str, Any] | None = None, **variables: str) -> Served:
            environment = {"DIR": str(shm / "dumps"), "WORKER": "w", "BOOT_ID": "boot", "BUDGET_BYTES": "16M"} | variables
            module.register_hooks({f"STATETAP_PLUGIN_{name}": value for name, value in environment.items()})
            opened.append(Served(module, shm / "dumps", model, arguments or {}))
            return opened[-1]

        yield serve
        for served in opened:
            if served.plugin.open is not None:
                assert served.plugin.open.tap._ring.held == 0
                served.plugin.open.close()


@pytest.fixture
def tap(shm: Path) -> Iterator[Tap]:
    tap = Tap(shm)
    yield tap
    tap.publisher.close()
    assert tap.cuda.pages == {}
