"""Real SGLang servers for the tests: folders of their own, and all processes ended with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For logs, stores and the service's data."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="module")
def dumps() -> Iterator[Path]:
    """A dump root in shared memory."""
    root = Path(tempfile.mkdtemp(prefix="statetap-e2e-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)
