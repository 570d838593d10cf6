"""Places for dumps: a tmpfs directory and one on disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["tmpfs", "disk"])
def root(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    """A dump root that does not exist yet."""
    return (shm if request.param == "tmpfs" else tmp_path) / "dumps"
