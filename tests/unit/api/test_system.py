"""What is asked of the service itself."""

from __future__ import annotations

import aiohttp

from tests.fakes.api_server import FakeService


async def test_health(http: aiohttp.ClientSession) -> None:
    answer = await http.get("/healthz")
    assert (answer.status, await answer.json()) == (200, {"status": "ok", "detail": ""})


async def test_readiness_says_why_not(http: aiohttp.ClientSession, service: FakeService) -> None:
    assert (await http.get("/readyz")).status == 200
    service.readiness = (False, "no worker is ready")
    answer = await http.get("/readyz")
    assert (answer.status, await answer.json()) == (503, {"status": "not ready", "detail": "no worker is ready"})


async def test_metrics_are_prometheus_text(http: aiohttp.ClientSession) -> None:
    answer = await http.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert await answer.text() == "statetap_up 1\n"


async def test_the_page_escapes_what_people_typed(http: aiohttp.ClientSession, service: FakeService, dataset: str) -> None:
    assert "None yet." in await (await http.get("/")).text()
    await http.post("/v1/jobs", json={"dataset": dataset, "store": "s", "name": "<script>alert(1)</script>"})
    await http.post("/v1/workers", json={"name": "gpu-0", "url": "http://h/?a=1&b=<2>", "dumps": {"kind": "plugin", "dir": "/d"}})
    answer = await http.get("/")
    text = await answer.text()
    assert answer.content_type == "text/html"
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "http://h/?a=1&amp;b=&lt;2&gt;" in text
