"""Every call of the API as data: what to send, and how to read the answer. No I/O, so that both clients share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from statetap_client.errors import ServiceUnreachable, StatetapError
from statetap_client.schemas import (
    REVEALED,
    Dataset,
    DatasetFromPath,
    Health,
    Job,
    JobRequest,
    Page,
    Problem,
    Request,
    Sample,
    Worker,
    WorkerRequest,
)

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8420"
URL_VARIABLE = "STATETAP_URL"
PAGE_LIMIT = 1000
FINAL_STATES = frozenset({"completed", "cancelled", "failed"})
# A proxy that the environment names is for the world outside, never for this machine.
DIRECT: dict[str, None] = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}

Verb = Literal["pause", "resume", "cancel", "retry"]
SampleStatusName = Literal["pending", "stored", "failed", "cancelled", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request. `expected` are statuses beside 2xx that are answers too; a `slow` one may take as long as it needs."""

    method: str
    path: str
    read: Callable[[bytes], T]
    query: Mapping[str, str | int | bool] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    expected: tuple[int, ...] = ()
    slow: bool = False

    def arguments(self, timeout_seconds: float) -> dict[str, Any]:
        """For httpx's `request` and `build_request`."""
        return {
            "method": self.method,
            "url": self.path,
            "params": dict(self.query),
            "headers": dict(self.headers),
            "content": self.body,
            "timeout": httpx.Timeout(timeout_seconds, read=None if self.slow else timeout_seconds),
        }


def settle(call: Call[T], response: httpx.Response) -> T:
    """The answer of a response that was read. StatetapError: it is a problem, or no answer of Statetap's."""
    raise_for_problem(response, call.expected)
    try:
        return call.read(response.content)
    except ValidationError as error:
        detail = f"{response.url} answered, but not as Statetap does; is the address right, and the client as new as the service?"
        raise StatetapError(Problem(title="Unexpected answer", status=response.status_code, detail=detail)) from error


def raise_for_problem(response: httpx.Response, expected: tuple[int, ...] = ()) -> None:
    if response.is_success or response.status_code in expected:
        return
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        detail = f"{response.url} answered HTTP {response.status_code} {response.reason_phrase}, and not as Statetap does"
        problem = Problem(title=response.reason_phrase or "Error", status=response.status_code, detail=detail)
    raise StatetapError(problem)


def service_url(url: str | None) -> str:
    """The service to talk to: as named, else by STATETAP_URL, else on this machine. ServiceUnreachable: no URL of a service."""
    chosen = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
    if not chosen.startswith(("http://", "https://")):
        raise ServiceUnreachable(chosen, "its URL must start with http:// or https://")
    try:
        httpx.URL(chosen)
    except httpx.InvalidURL as error:
        raise ServiceUnreachable(chosen, str(error)) from error
    return chosen


def unreachable(url: str, error: Exception) -> ServiceUnreachable:
    return ServiceUnreachable(url, str(error) or type(error).__name__)


def create_dataset(*, gzipped: bool, name: str | None, model: str | None, allow_empty_mask: bool) -> Call[Dataset]:
    """The body is streamed by the client, so it is not part of the call."""
    headers = {"Content-Type": "application/x-ndjson"} | ({"Content-Encoding": "gzip"} if gzipped else {})
    return Call(
        method="POST",
        path="/v1/datasets",
        read=Dataset.model_validate_json,
        query=_dataset_query(name, model, allow_empty_mask=allow_empty_mask),
        headers=headers,
        slow=True,
    )


def create_dataset_from_path(path: str, *, name: str | None, model: str | None, allow_empty_mask: bool) -> Call[Dataset]:
    return Call(
        method="POST",
        path="/v1/datasets",
        read=Dataset.model_validate_json,
        query=_dataset_query(name, model, allow_empty_mask=allow_empty_mask),
        slow=True,
        **_json(DatasetFromPath(path=path)),
    )


def datasets(cursor: str | None) -> Call[Page[Dataset]]:
    return Call(method="GET", path="/v1/datasets", read=Page[Dataset].model_validate_json, query=_page_query(cursor))


def dataset(dataset_id: str) -> Call[Dataset]:
    return Call(method="GET", path=f"/v1/datasets/{_part(dataset_id)}", read=Dataset.model_validate_json)


def delete_dataset(dataset_id: str) -> Call[None]:
    return Call(method="DELETE", path=f"/v1/datasets/{_part(dataset_id)}", read=_nothing)


def submit(request: JobRequest, idempotency_key: str | None) -> Call[Job]:
    sent = _json(request)
    if idempotency_key is not None:
        sent["headers"]["Idempotency-Key"] = idempotency_key
    return Call(method="POST", path="/v1/jobs", read=Job.model_validate_json, slow=True, **sent)


def jobs(cursor: str | None) -> Call[Page[Job]]:
    return Call(method="GET", path="/v1/jobs", read=Page[Job].model_validate_json, query=_page_query(cursor))


def job(job_id: str) -> Call[Job]:
    return Call(method="GET", path=f"/v1/jobs/{_part(job_id)}", read=Job.model_validate_json)


def steer(job_id: str, verb: Verb) -> Call[Job]:
    return Call(method="POST", path=f"/v1/jobs/{_part(job_id)}/{verb}", read=Job.model_validate_json, slow=True)


def samples(job_id: str, status: SampleStatusName | None, cursor: str | None) -> Call[Page[Sample]]:
    query = _page_query(cursor) | ({} if status is None else {"status": status})
    return Call(method="GET", path=f"/v1/jobs/{_part(job_id)}/samples", read=Page[Sample].model_validate_json, query=query)


def events_path(job_id: str) -> str:
    return f"/v1/jobs/{_part(job_id)}/events"


def workers() -> Call[Page[Worker]]:
    return Call(method="GET", path="/v1/workers", read=Page[Worker].model_validate_json)


def add_worker(request: WorkerRequest) -> Call[Worker]:
    return Call(method="POST", path="/v1/workers", read=Worker.model_validate_json, slow=True, **_json(request))


def remove_worker(name: str) -> Call[None]:
    return Call(method="DELETE", path=f"/v1/workers/{_part(name)}", read=_nothing, slow=True)


def drain_worker(name: str) -> Call[Worker]:
    return Call(method="POST", path=f"/v1/workers/{_part(name)}/drain", read=Worker.model_validate_json)


def health() -> Call[Health]:
    return Call(method="GET", path="/readyz", read=Health.model_validate_json, expected=(503,))


def _json(request: Request) -> dict[str, Any]:
    return {"body": request.model_dump_json(context=REVEALED).encode(), "headers": {"Content-Type": "application/json"}}


def _nothing(content: bytes) -> None:
    del content


def _part(name: str) -> str:
    return quote(name, safe="")


def _page_query(cursor: str | None) -> dict[str, str | int | bool]:
    return {"limit": PAGE_LIMIT} if cursor is None else {"limit": PAGE_LIMIT, "cursor": cursor}


def _dataset_query(name: str | None, model: str | None, *, allow_empty_mask: bool) -> dict[str, str | int | bool]:
    query: dict[str, str | int | bool] = {"allow_empty_mask": allow_empty_mask}
    if name is not None:
        query["name"] = name
    if model is not None:
        query["model"] = model
    return query
