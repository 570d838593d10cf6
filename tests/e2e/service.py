"""The service as a process, over real SGLang servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statetap_client.schemas import Sample
from statetap_client.sync import SyncStatetapClient

from tests.e2e.server import SglangServer
from tests.fakes.cluster import Cluster, Worker


@contextmanager
def service_over(
    folder: Path, servers: Mapping[str, SglangServer], *, ports: Mapping[str, int] | None = None, **runtime: Any
) -> Iterator[tuple[Cluster, SyncStatetapClient]]:
    """A service whose workers are the servers, and a client of it. `ports`: where it asks a worker, if not at its server.

    The servers are not waited for, nor ended.
    """
    first = next(iter(servers.values()))
    made = Cluster(folder, first.dumps, first.model, runtime)
    for name, server in servers.items():
        made.workers[name] = Worker(name, (), server, (ports or {}).get(name, server.port))
    try:
        with made.start_service() as client:
            yield made, client
    finally:
        if made.service is not None:
            made.service.stop()


def failures_of(client: SyncStatetapClient, job: str) -> list[Sample]:
    return list(client.samples(job, status="failed"))
