"""Jobs: submitted once per idempotency key, watched, steered, and asked for what became of each sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any, Final, Literal

from aiohttp import web
from pydantic import Field
from statetap_client.schemas import Job, JobRequest, Page, Sample

from statetap.api import translate
from statetap.api.bodies import JsonBody, NoBody
from statetap.api.gate import Scope
from statetap.api.problems import RequestRefused
from statetap.api.routing import Call, Header, NoQuery, PageQuery, Reply, Route
from statetap.runtime.views import Jobs, JobView

IDEMPOTENCY_KEY = "Idempotency-Key"
LONGEST_KEY = 255
KEY_SCHEMA: Final = {"type": "string", "pattern": f"^[ -~]{{1,{LONGEST_KEY}}}$"}


class SamplesQuery(PageQuery):
    """Which samples."""

    status: Literal["pending", "stored", "failed", "cancelled", "skipped"] | None = Field(
        default=None, description="Only samples with this outcome."
    )


def idempotency_key(request: web.Request) -> str | None:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not (0 < len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
        detail = f"{IDEMPOTENCY_KEY} must be 1 to {LONGEST_KEY} printable ASCII characters"
        raise RequestRefused(400, detail, field=IDEMPOTENCY_KEY)
    return key


def request_hash(request: JobRequest) -> str:
    """Over the request as understood: bodies that ask for the same thing in other words have the same hash."""
    return sha256(request.model_dump_json().encode()).hexdigest()


async def submit(call: Call[NoQuery, JobRequest]) -> Reply:
    view, _ = await call.services.jobs.submit(
        translate.submission(call.body), idempotency_key=idempotency_key(call.request), request_hash=request_hash(call.body)
    )
    return Reply(translate.job(view), headers={"Location": f"/v1/jobs/{view.record.id}"})


async def index(call: Call[PageQuery, None]) -> Reply:
    page = await call.services.jobs.list(limit=call.query.limit, cursor=call.query.cursor)
    return Reply(Page[Job](items=[translate.job(view) for view in page.items], cursor=page.cursor))


async def show(call: Call[NoQuery, None]) -> Reply:
    return Reply(translate.job(await call.services.jobs.view(call.path["job"])))


async def samples(call: Call[SamplesQuery, None]) -> Reply:
    services, query, job = call.services, call.query, call.path["job"]
    await services.ledger.job(job)
    status = None if query.status is None else translate.sample_status(query.status)
    page = await services.ledger.samples(job, status=status, limit=query.limit, cursor=query.cursor)
    return Reply(Page[Sample](items=[translate.sample(record) for record in page.items], cursor=page.cursor))


def _steering(verb: str, summary: str, act: Callable[[Jobs, str], Awaitable[JobView]]) -> Route[NoQuery, None]:
    async def handler(call: Call[NoQuery, None]) -> Reply:
        return Reply(translate.job(await act(call.services.jobs, call.path["job"])))

    return Route(
        method="POST",
        path=f"/v1/jobs/{{job}}/{verb}",
        summary=summary,
        handler=handler,
        query=NoQuery,
        body=NoBody(),
        tag="jobs",
        scope=Scope.ADMIN,
        answer=Job,
        problems=(404, 409),
    )


ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        method="POST",
        path="/v1/jobs",
        summary="Submit a job. Refused if the store lacks the space, and while no worker has told the model's shape.",
        handler=submit,
        query=NoQuery,
        body=JsonBody(JobRequest),
        headers=(Header(IDEMPOTENCY_KEY, "The same key with the same body is answered with the same job, always.", KEY_SCHEMA),),
        tag="jobs",
        scope=Scope.ADMIN,
        status=202,
        answer=Job,
        located=True,
        problems=(404, 409, 413, 415, 507),
    ),
    Route(
        method="GET",
        path="/v1/jobs",
        summary="List the jobs, newest first.",
        handler=index,
        query=PageQuery,
        body=NoBody(),
        tag="jobs",
        scope=Scope.READ_ONLY,
        answer=Page[Job],
    ),
    Route(
        method="GET",
        path="/v1/jobs/{job}",
        summary="Show a job: state, counts, rates, ETA, failures by reason.",
        handler=show,
        query=NoQuery,
        body=NoBody(),
        tag="jobs",
        scope=Scope.READ_ONLY,
        answer=Job,
        problems=(404,),
    ),
    _steering("pause", "Pause a job: units in work end, no further one starts.", lambda jobs, job: jobs.pause(job)),
    _steering("resume", "Resume a paused job.", lambda jobs, job: jobs.resume(job)),
    _steering("cancel", "Cancel a job: what is stored stays.", lambda jobs, job: jobs.cancel(job)),
    _steering("retry", "Try the failed samples again, in new units at the store's end.", lambda jobs, job: jobs.retry(job)),
    Route(
        method="GET",
        path="/v1/jobs/{job}/samples",
        summary="List what became of each sample.",
        handler=samples,
        query=SamplesQuery,
        body=NoBody(),
        tag="jobs",
        scope=Scope.READ_ONLY,
        answer=Page[Sample],
        problems=(404,),
    ),
)
