"""What a route takes as its body: nothing, JSON of one model, or a stream of NDJSON that is never held in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel

from statetap.api.problems import RequestRefused
from statetap.api.services import Limits

M = TypeVar("M", bound=BaseModel)
B_co = TypeVar("B_co", covariant=True)

JSON = "application/json"
NDJSON = "application/x-ndjson"


class Body(Protocol[B_co]):
    """A kind of body. `models` is what the OpenAPI document says of it: the model of each media type, None for NDJSON."""

    @property
    def models(self) -> dict[str, type[BaseModel] | None]: ...

    async def read(self, request: web.Request, limits: Limits) -> B_co:
        """Raises RequestRefused (413, 415) or pydantic's ValidationError."""
        ...


class NoBody:
    """The route takes none; one that is sent anyway is not read."""

    @property
    def models(self) -> dict[str, type[BaseModel] | None]:
        return {}

    async def read(self, request: web.Request, limits: Limits) -> None:
        return None


class JsonBody(Generic[M]):
    """One JSON object, validated by `model`."""

    def __init__(self, model: type[M]) -> None:
        self.model = model

    @property
    def models(self) -> dict[str, type[BaseModel] | None]:
        return {JSON: self.model}

    async def read(self, request: web.Request, limits: Limits) -> M:
        if request.content_type != JSON:
            raise RequestRefused(415, f"this call takes {JSON}, not {request.content_type}", field="Content-Type")
        if _encoding(request) != "identity":
            raise RequestRefused(415, f"{JSON} is taken uncompressed only", field="Content-Encoding")
        raw = bytearray()
        async for chunk in _bounded(request, limits.json_bytes):
            raw += chunk
        return self.model.model_validate_json(bytes(raw))


@dataclass(frozen=True, slots=True)
class NdjsonStream:
    """NDJSON as it arrives, still compressed where it is `gzipped`."""

    chunks: AsyncIterator[bytes]
    gzipped: bool


class NdjsonOrJson(Generic[M]):
    """A stream of NDJSON, gzip or not; or, as `application/json`, one object that says where to find it."""

    def __init__(self, model: type[M]) -> None:
        self._json = JsonBody(model)

    @property
    def models(self) -> dict[str, type[BaseModel] | None]:
        return {NDJSON: None, **self._json.models}

    async def read(self, request: web.Request, limits: Limits) -> NdjsonStream | M:
        if request.content_type == JSON:
            return await self._json.read(request, limits)
        if request.content_type != NDJSON:
            detail = f"a dataset is sent as {NDJSON}, or named by path as {JSON}; not as {request.content_type}"
            raise RequestRefused(415, detail, field="Content-Type")
        encoding = _encoding(request)
        if encoding not in ("identity", "gzip"):
            raise RequestRefused(415, f"{NDJSON} is taken as it is or with gzip, not with {encoding}", field="Content-Encoding")
        return NdjsonStream(_bounded(request, limits.dataset_bytes), gzipped=encoding == "gzip")


def _encoding(request: web.Request) -> str:
    return request.headers.get("Content-Encoding", "identity").strip().lower()


async def _bounded(request: web.Request, limit: int | None) -> AsyncIterator[bytes]:
    """The body's chunks as sent. The server must not decompress them by itself: `server.OPTIONS` sees to it."""
    too_large = f"the body is larger than the service takes here, {limit} bytes"
    if limit is not None and (request.content_length or 0) > limit:
        raise RequestRefused(413, too_large)
    received = 0
    async for chunk in request.content.iter_any():
        received += len(chunk)
        if limit is not None and received > limit:
            raise RequestRefused(413, too_large)
        yield chunk
