"""The API as an aiohttp application: the routes, and the middleware around them. `server` runs it."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any, Final

import orjson
from aiohttp import web

from statetap.api import datasets, event_stream, jobs, system, workers
from statetap.api.dispatch import endpoint, problem_middleware
from statetap.api.openapi import openapi_document
from statetap.api.routing import Route
from statetap.api.services import Services

ROUTES: Final[tuple[Route[Any, Any], ...]] = (
    *datasets.ROUTES,
    *jobs.ROUTES,
    *event_stream.ROUTES,
    *workers.ROUTES,
    *system.ROUTES,
)


def build_app(services: Services) -> web.Application:
    app = web.Application(middlewares=[problem_middleware(services.log)])
    app[event_stream.CLOSING] = asyncio.Event()
    app[system.OPENAPI_DOCUMENT] = render_openapi()
    app.on_shutdown.append(_end_streams)
    for route in ROUTES:
        handler = endpoint(route, services)
        app.router.add_route(route.method, route.path, handler)
        if route.method == "GET" and route.media_type != event_stream.EVENT_STREAM:
            app.router.add_route("HEAD", route.path, handler)
    return app


@cache
def render_openapi() -> bytes:
    """The OpenAPI document as it is served, and as it stands in `docs/openapi.json`."""
    return orjson.dumps(openapi_document(ROUTES), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


async def _end_streams(app: web.Application) -> None:
    app[event_stream.CLOSING].set()
