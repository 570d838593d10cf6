"""From a request to a typed call, from a reply to a response, and from any error to a problem."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from multidict import MultiMapping
from structlog.typing import FilteringBoundLogger

from statetap.api.bodies import JSON
from statetap.api.gate import CallerRefused, Scope
from statetap.api.problems import NO_HEADERS, RequestRefused, problem, problem_of, problem_response
from statetap.api.routing import Call, Q, Reply, Route
from statetap.api.services import Services
from statetap.telemetry import events

RETRY_AFTER_SECONDS = "5"


def endpoint(route: Route[Any, Any], services: Services) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The route as aiohttp wants it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            services.gate.admit(request, route.scope)
        except CallerRefused as refusal:
            services.log.warning(
                events.API_CALLER_REFUSED, method=request.method, path=route.path, status=refusal.status, reason=refusal.detail
            )
            raise
        if route.scope is Scope.ADMIN and not (readiness := services.readiness())[0]:
            raise RequestRefused(503, f"{readiness[1]}; send it again in a moment", headers={"Retry-After": RETRY_AFTER_SECONDS})
        query = parse_query(route.query, request.query)
        body = await route.body.read(request, services.limits)
        reply = await route.handler(Call(services, request, request.match_info, query, body))
        return respond(route, reply) if isinstance(reply, Reply) else reply

    return handle


def parse_query(model: type[Q], query: MultiMapping[str]) -> Q:
    for name in query:
        if len(query.getall(name)) > 1:
            raise RequestRefused(400, f"the query names {name} more than once; name it once", field=name)
    return model.model_validate(dict(query))


def respond(route: Route[Any, Any], reply: Reply) -> web.Response:
    status = route.status if reply.status is None else reply.status
    if reply.body is None:
        return web.Response(status=status, headers=reply.headers)
    return web.Response(body=reply.body.model_dump_json().encode(), status=status, content_type=JSON, headers=reply.headers)


def problem_middleware(log: FilteringBoundLogger) -> Middleware:
    """Turns what handlers and the router raise into problems. A fault of the service is logged, and not told."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:
            if isinstance(error, ConnectionError) and _left(request):
                # Nobody reads this answer; aiohttp wants one all the same.
                return problem_response(problem(400, "the connection broke before the request was complete"))
            answer = problem_of(error)
            if answer is None:
                log.exception(events.API_REQUEST_FAILED, method=request.method, path=request.path, status=500, error=repr(error))
                answer = problem(500, "the service failed to answer this request; its log has the details")
            return problem_response(answer, _headers_of(error))

    return middleware


def _headers_of(error: Exception) -> Mapping[str, str]:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return {"Allow": error.headers["Allow"]}
    return error.headers if isinstance(error, RequestRefused) else NO_HEADERS


def _left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
