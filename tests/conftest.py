"""What every test gives back: the process's logging, which a command under test may have sent to a stream that is gone.

And the S3 server that tests share, which is started once, and only where one asks for it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from tests.fakes.object_store import ObjectStore


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="session")
def served_objects() -> Iterator[ObjectStore]:
    # Late: most tests do without, and moto takes a second.
    from tests.fakes.object_store import served_object_store

    with served_object_store() as served:
        yield served


@pytest.fixture
def object_store(served_objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, with its credentials in this process's environment, and without a fault."""
    for name, value in served_objects.environment.items():
        monkeypatch.setenv(name, value)
    yield served_objects
    served_objects.gate.faults.clear()
    served_objects.gate.requests.clear()
    served_objects.gate.before = lambda method, path: None


@pytest.fixture
def object_place(object_store: ObjectStore, request: pytest.FixtureRequest) -> str:
    """A URL below which nothing is yet."""
    return f"{object_store.url}/{zlib.crc32(request.node.nodeid.encode()):08x}"
