"""What is asked of the service itself: is it alive, is it ready, its metrics, its OpenAPI document, a page for people."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from statetap_client.schemas import Health

from statetap.api.bodies import NoBody
from statetap.api.gate import Scope
from statetap.api.page import render_page
from statetap.api.routing import Call, NoQuery, Reply, Route

OPENAPI_DOCUMENT: Final = web.AppKey("openapi_document", bytes)
JOBS_ON_PAGE = 50
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


async def healthz(call: Call[NoQuery, None]) -> Reply:
    return Reply(Health(status="ok"))


async def readyz(call: Call[NoQuery, None]) -> Reply:
    ready, detail = call.services.readiness()
    return Reply(Health(status="ok" if ready else "not ready", detail=detail), status=200 if ready else 503)


async def metrics(call: Call[NoQuery, None]) -> web.Response:
    return web.Response(body=call.services.render_metrics(), headers={"Content-Type": PROMETHEUS_TEXT})


async def openapi(call: Call[NoQuery, None]) -> web.Response:
    return web.Response(body=call.request.app[OPENAPI_DOCUMENT], content_type="application/json")


async def page(call: Call[NoQuery, None]) -> web.Response:
    jobs = await call.services.jobs.list(limit=JOBS_ON_PAGE, cursor=None)
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
    return web.Response(text=render_page(jobs.items, call.services.workers.list()), content_type="text/html", headers=headers)


ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        method="GET",
        path="/healthz",
        summary="Whether the service is alive.",
        handler=healthz,
        query=NoQuery,
        body=NoBody(),
        tag="service",
        scope=None,
        answer=Health,
    ),
    Route(
        method="GET",
        path="/readyz",
        summary="Whether the service can take work, and if not, why.",
        handler=readyz,
        query=NoQuery,
        body=NoBody(),
        tag="service",
        scope=None,
        answer=Health,
        also={503: Health},
    ),
    Route(
        method="GET",
        path="/metrics",
        summary="Metrics in Prometheus' text format.",
        handler=metrics,
        query=NoQuery,
        body=NoBody(),
        tag="service",
        scope=Scope.READ_ONLY,
        media_type="text/plain",
    ),
    Route(
        method="GET",
        path="/openapi.json",
        summary="This document.",
        handler=openapi,
        query=NoQuery,
        body=NoBody(),
        tag="service",
        scope=None,
    ),
    Route(
        method="GET",
        path="/",
        summary="Jobs and workers, for people.",
        handler=page,
        query=NoQuery,
        body=NoBody(),
        tag="service",
        scope=Scope.READ_ONLY,
        media_type="text/html",
    ),
)
