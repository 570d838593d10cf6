"""The real API over the fake runtime, on a real socket: in the test's own loop, or in a thread for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from aiohttp import web
from statetap.api.app import build_app
from statetap.api.gate import Gate
from statetap.api.server import ApiRunner
from statetap.api.services import Limits, Services
from structlog.testing import LogCapture

from tests.fakes.runtime import FakeDatasets, FakeJobs, FakeWorkers, MemoryLedger

T = TypeVar("T")


class FakeService:
    """The fakes behind one API, and what it logged."""

    def __init__(self, root: Path, limits: Limits = Limits(), gate: Gate = Gate()) -> None:  # noqa: B008 - both never change
        self.ledger = MemoryLedger()
        self.jobs = FakeJobs(self.ledger)
        self.workers = FakeWorkers()
        self.datasets = FakeDatasets(self.ledger, root)
        self.readiness = (True, "")
        self.limits = limits
        self.gate = gate
        self._capture = LogCapture()

    @property
    def logged(self) -> list[dict[str, Any]]:
        return list(self._capture.entries)

    def app(self) -> web.Application:
        log = structlog.wrap_logger(
            structlog.PrintLogger(), processors=[self._capture], wrapper_class=structlog.make_filtering_bound_logger(0)
        )
        return build_app(
            Services(
                jobs=self.jobs,
                workers=self.workers,
                datasets=self.datasets,
                ledger=self.ledger,
                readiness=lambda: self.readiness,
                render_metrics=lambda: b"statetap_up 1\n",
                log=log,
                limits=self.limits,
                gate=self.gate,
            )
        )


@asynccontextmanager
async def serving(service: FakeService, port: int = 0) -> AsyncIterator[str]:
    """The service's URL, as long as it is served."""
    runner = ApiRunner(service.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


class ServedInThread:
    """A service whose loop runs in a thread of its own; `call` runs a coroutine there."""

    def __init__(self, service: FakeService, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.service = service
        self.url = url
        self._loop = loop

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)


@contextmanager
def serving_in_thread(service: FakeService) -> Iterator[ServedInThread]:
    started: asyncio.Queue[ServedInThread] = asyncio.Queue()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(service) as url:
            started.put_nowait(ServedInThread(service, url, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(timeout=30)
    served = started.get_nowait()
    try:
        yield served
    finally:
        served.call(_set(stop))
        thread.join(timeout=30)


async def _set(event: asyncio.Event) -> None:
    event.set()
