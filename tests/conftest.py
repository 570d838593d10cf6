"""What every test gives back: the process's logging, which a command under test may have sent to a stream that is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
