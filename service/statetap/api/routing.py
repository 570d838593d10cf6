"""How a route is declared: all that the dispatcher and the OpenAPI document need to know of it, in one place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from statetap.api.bodies import JSON, Body
from statetap.api.gate import Scope
from statetap.api.services import Services

Q = TypeVar("Q", bound=BaseModel)
B = TypeVar("B")


class NoQuery(BaseModel):
    """No query parameters. Unknown ones are an error here and in every other query model."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PageQuery(NoQuery):
    """Which page of a list."""

    limit: int = Field(default=100, ge=1, le=1000, description="How many items a page may hold.")
    cursor: str | None = Field(default=None, description="`cursor` of the page before.")


@dataclass(frozen=True, slots=True)
class Header:
    """A request header that a route honours; `schema` is what its value must be, as JSON schema."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """One request, parsed: `path` holds the path's parameters by name."""

    services: Services
    request: web.Request
    path: Mapping[str, str]
    query: Q
    body: B


@dataclass(frozen=True, slots=True)
class Reply:
    """A handler's answer. `status` None: the route's."""

    body: BaseModel | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[Q, B]):
    """A method of a path. `answer` None with `application/json` means an empty body; `also` are further answers by status.

    `scope` is the least that a caller's key must allow; None lets anybody in.
    `problems` are the statuses of its errors beside those that every route has.
    """

    method: str
    path: str
    summary: str
    handler: Callable[[Call[Q, B]], Awaitable[Reply | web.StreamResponse]]
    query: type[Q]
    body: Body[B]
    tag: str
    scope: Scope | None
    headers: tuple[Header, ...] = ()
    status: int = 200
    answer: type[BaseModel] | None = None
    media_type: str = JSON
    also: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    located: bool = False
    problems: tuple[int, ...] = ()
