"""Every error of the API becomes an RFC 9457 problem, and this module alone decides which."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from statetap_client.schemas import Problem

from statetap.ports import BadCursor, DatasetRefused, IdempotencyConflict, LedgerError, NotFound
from statetap.runtime.views import RefusalKind, Refused

PROBLEM_JSON = "application/problem+json"
REFUSAL_STATUS = {RefusalKind.INVALID: 400, RefusalKind.CONFLICT: 409, RefusalKind.NO_SPACE: 507}
LEDGER_ERRORS: dict[type[LedgerError], tuple[int, str | None]] = {
    NotFound: (404, None),
    BadCursor: (400, "cursor"),
    IdempotencyConflict: (409, "Idempotency-Key"),
    LedgerError: (409, None),
}
FIELDS_IN_DETAIL = 3
NO_HEADERS: Mapping[str, str] = {}


class RequestRefused(Exception):
    """A request that the API itself refuses, before anything behind it was asked. `headers` go with the answer."""

    def __init__(self, status: int, detail: str, *, field: str | None = None, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.headers = headers


def problem(status: int, detail: str, *, line: int | None = None, field: str | None = None, **more: Any) -> Problem:
    return Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, line=line, field=field, **more)


def problem_of(error: Exception) -> Problem | None:
    """The problem that tells a client of `error`; None if it is not the client's business: a fault of the service."""
    match error:
        case RequestRefused():
            return problem(error.status, error.detail, field=error.field)
        case ValidationError():
            return _invalid(error)
        case DatasetRefused():
            return problem(400, str(error), line=error.line, field=error.field)
        case Refused():
            return problem(REFUSAL_STATUS[error.kind], error.detail, line=error.line, field=error.field)
        case LedgerError():
            status, field = next(told for kind, told in LEDGER_ERRORS.items() if isinstance(error, kind))
            return problem(status, str(error), field=field)
        case web.RequestPayloadError():
            return problem(400, f"the body cannot be read: {error}")
        case web.HTTPException():
            return problem(error.status, error.text or HTTPStatus(error.status).description)
    return None


def problem_response(answer: Problem, headers: Mapping[str, str] = NO_HEADERS) -> web.Response:
    body = answer.model_dump_json(exclude_none=True).encode()
    return web.Response(body=body, status=answer.status, content_type=PROBLEM_JSON, headers=headers)


def _invalid(error: ValidationError) -> Problem:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = [".".join(str(part) for part in item["loc"]) for item in found]
    told = [f"{place}: {item['msg']}" if place else item["msg"] for place, item in zip(places, found, strict=True)]
    errors = [{"field": place or None, "message": item["msg"]} for place, item in zip(places, found, strict=True)]
    if len(told) > FIELDS_IN_DETAIL:
        told[FIELDS_IN_DETAIL:] = [f"and {len(told) - FIELDS_IN_DETAIL} more"]
    return problem(400, "; ".join(told), field=places[0] or None, errors=errors)
