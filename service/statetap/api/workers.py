"""Workers: listed, added, removed, drained."""

from __future__ import annotations

from typing import Any

from statetap_client.schemas import Page, Worker, WorkerRequest

from statetap.api import translate
from statetap.api.bodies import JsonBody, NoBody
from statetap.api.gate import Scope
from statetap.api.routing import Call, NoQuery, Reply, Route


async def index(call: Call[NoQuery, None]) -> Reply:
    """One page: there are as many workers as somebody registered by hand."""
    return Reply(Page[Worker](items=[translate.worker(view) for view in call.services.workers.list()]))


async def add(call: Call[NoQuery, WorkerRequest]) -> Reply:
    return Reply(translate.worker(await call.services.workers.add(translate.worker_record(call.body))))


async def remove(call: Call[NoQuery, None]) -> Reply:
    await call.services.workers.remove(call.path["worker"])
    return Reply()


async def drain(call: Call[NoQuery, None]) -> Reply:
    return Reply(translate.worker(await call.services.workers.drain(call.path["worker"])))


ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        method="GET",
        path="/v1/workers",
        summary="List the workers.",
        handler=index,
        query=NoQuery,
        body=NoBody(),
        tag="workers",
        scope=Scope.READ_ONLY,
        answer=Page[Worker],
    ),
    Route(
        method="POST",
        path="/v1/workers",
        summary="Add a worker.",
        handler=add,
        query=NoQuery,
        body=JsonBody(WorkerRequest),
        tag="workers",
        scope=Scope.ADMIN,
        status=201,
        answer=Worker,
        problems=(409, 413, 415),
    ),
    Route(
        method="DELETE",
        path="/v1/workers/{worker}",
        summary="Remove a worker; what it was asked for is asked of another.",
        handler=remove,
        query=NoQuery,
        body=NoBody(),
        tag="workers",
        scope=Scope.ADMIN,
        status=204,
        problems=(404, 409),
    ),
    Route(
        method="POST",
        path="/v1/workers/{worker}/drain",
        summary="Drain a worker: what is in flight ends, nothing further is asked of it.",
        handler=drain,
        query=NoQuery,
        body=NoBody(),
        tag="workers",
        scope=Scope.ADMIN,
        answer=Worker,
        problems=(404, 409),
    ),
)
