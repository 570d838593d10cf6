"""The real API on a real socket over the fake runtime, and a plain HTTP client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from statetap.api.services import Limits

from tests.fakes.api_server import FakeService, serving


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path, Limits(json_bytes=10_000, dataset_bytes=100_000))


@pytest.fixture
async def http(service: FakeService) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(service) as url, aiohttp.ClientSession(url) as session:
        yield session


@pytest.fixture
async def dataset(http: aiohttp.ClientSession) -> str:
    body = b"\n".join(b'{"input_ids": [1, 2, 3]}' for _ in range(5))
    async with http.post("/v1/datasets?name=five", data=body, headers={"Content-Type": "application/x-ndjson"}) as answer:
        assert answer.status == 201
        return (await answer.json())["id"]


@pytest.fixture
async def job(http: aiohttp.ClientSession, dataset: str) -> str:
    async with http.post("/v1/jobs", json={"dataset": dataset, "store": "s.zarr"}) as answer:
        assert answer.status == 202
        return (await answer.json())["id"]
