"""How the API is served: aiohttp's runner, but what it answers by itself is a problem too.

Requests that are not HTTP, or whose lines are too long, never reach the application: aiohttp's connection handler answers them,
as plain text and with a traceback in the log. They are the sender's fault, so here they are problems, and not logged. Nor does a
header `Expect` that asks for anything but 100-continue reach the application's middleware.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from statetap.api.problems import problem, problem_response

OPTIONS: Final[dict[str, Any]] = {"auto_decompress": False, "access_log": None, "lingering_time": 1.0}
"""Bodies stay as sent: decompressing, and its bounds, belong to who reads them.

A dataset that is refused in mid-upload is not read on for long: a broken connection makes its client look for the answer.
"""
SERVER_ERROR = 500


class ApiRunner(web.AppRunner):
    """Runs an application made by `app.build_app`."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float = 60.0) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout, **OPTIONS)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(_with_problems(made.request_handler), request_factory=made.request_factory, **OPTIONS)


def _with_problems(handle: Callable[[Any], Awaitable[web.StreamResponse]]) -> Callable[[Any], Awaitable[web.StreamResponse]]:
    async def handle_any(request: Any) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as error:
            return problem_response(problem(error.status, error.text or error.reason))

    return handle_any


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **OPTIONS)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = SERVER_ERROR, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Raises ConnectionError where an answer has begun."""
        if status >= SERVER_ERROR:
            super().handle_error(request, status, exc, message)
            detail = "the service failed to answer this request; its log has the details"
        elif request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so the error cannot be told")
        elif isinstance(exc, LineTooLong):
            detail = "the request line or a header is longer than the service reads"
        else:
            detail = "what was sent is not HTTP/1.1"
        response = problem_response(problem(status, detail))
        response.force_close()
        return response
