"""A job's events as server-sent events: the whole log from any point on, then what comes, until the client has seen enough."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web
from aiohttp_sse import EventSourceResponse
from pydantic import Field
from statetap_client.schemas import Event

from statetap.api import translate
from statetap.api.bodies import NoBody
from statetap.api.gate import Scope
from statetap.api.problems import RequestRefused
from statetap.api.routing import Call, Header, NoQuery, Route
from statetap.api.services import Services
from statetap.telemetry import events

EVENT_STREAM = "text/event-stream"
LAST_EVENT_ID = "Last-Event-ID"
LONGEST_ID = 18
ID_SCHEMA: Final = {"type": "string", "pattern": f"^[0-9]{{1,{LONGEST_ID}}}$"}
BATCH = 500
LOOK_SECONDS = 15.0
"""How often a silent stream looks whether its client is still there; the response's own pings find out."""
CLOSING: Final = web.AppKey("closing", asyncio.Event)
"""Set when the service shuts down: open streams end instead of holding it up."""


class EventsQuery(NoQuery):
    """How long to stay."""

    follow: bool = Field(default=True, description="Stay and send what comes; false: end when the log so far is sent.")


async def stream(call: Call[EventsQuery, None]) -> web.StreamResponse:
    services, job = call.services, call.path["job"]
    after = last_event_id(call.request)
    await services.ledger.job(job)
    response = EventSourceResponse()
    await response.prepare(call.request)
    async with response:
        try:
            await _send_log(services, call.request, response, job, after, follow=call.query.follow)
        except ConnectionError:
            pass  # The client left: that is how a stream usually ends.
        except Exception as error:
            # The head is sent, so this can't be a problem document; the stream ends, and the client resumes.
            services.log.exception(events.API_REQUEST_FAILED, method="GET", path=call.request.path, status=200, error=repr(error))
    return response


async def _send_log(
    services: Services, request: web.Request, response: EventSourceResponse, job: str, after: int, *, follow: bool
) -> None:
    closing = request.app[CLOSING]
    while response.is_connected() and not closing.is_set():
        batch = await services.ledger.events(job, after=after, limit=BATCH)
        for record in batch:
            await response.send(translate.event(record).model_dump_json(), id=str(record.id), event=record.name)
            after = record.id
        if not batch:
            if not follow:
                return
            await _wait(services, closing, job, after)


async def _wait(services: Services, closing: asyncio.Event, job: str, after: int) -> None:
    """Return at the next event, at the service's end, or after a while, to see whether the client is still there."""
    waits: tuple[asyncio.Future[Any], ...] = (
        asyncio.ensure_future(services.jobs.wait_for_event(job, after, timeout_seconds=LOOK_SECONDS)),
        asyncio.ensure_future(closing.wait()),
    )
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    for wait in done:
        wait.result()


def last_event_id(request: web.Request) -> int:
    text = request.headers.get(LAST_EVENT_ID, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= LONGEST_ID):
        raise RequestRefused(400, f"{LAST_EVENT_ID} must be the id of an event, not {text!r}", field=LAST_EVENT_ID)
    return int(text)


ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        method="GET",
        path="/v1/jobs/{job}/events",
        summary="Follow a job's event log as server-sent events; `data` of each is an Event as JSON.",
        handler=stream,
        query=EventsQuery,
        body=NoBody(),
        headers=(Header(LAST_EVENT_ID, "Resume after this event; 0, the default, is the log's start.", ID_SCHEMA),),
        tag="jobs",
        scope=Scope.READ_ONLY,
        answer=Event,
        media_type=EVENT_STREAM,
        problems=(404,),
    ),
)
