"""What several files need and none of them harms: the small model, and a service over one worker that nothing disturbs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.cluster import Cluster, cluster, small_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    """One worker, plugin dumps, no chunks, layers 0 and 1 with both final states: what it stores, others are compared with."""
    with cluster(tmp_path_factory.mktemp("calm"), model) as made:
        made.start_worker("w", "--layers", "0,1")
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
        yield made
