"""Server-sent events: the log from any point, what comes later, and how a stream ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from statetap.api import event_stream

from tests.fakes.api_server import FakeService, serving


async def messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, str]]:
    """The stream's messages as fields; comments are left out."""
    fields: dict[str, str] = {}
    async for line in answer.content:
        text = line.decode().rstrip("\r\n")
        if not text and fields:
            yield fields
            fields = {}
        elif text and not text.startswith(":"):
            name, _, value = text.partition(": ")
            fields[name] = value


async def test_the_log_is_sent_from_its_start_and_ends_when_asked_to(http: aiohttp.ClientSession, job: str) -> None:
    await http.post(f"/v1/jobs/{job}/pause")
    async with http.get(f"/v1/jobs/{job}/events?follow=false") as answer:
        assert answer.content_type == "text/event-stream"
        seen = [m async for m in messages(answer)]
    assert [(m["id"], m["event"]) for m in seen] == [("1", "job.submitted"), ("2", "job.paused")]
    assert json.loads(seen[0]["data"]) == {
        "id": 1,
        "event": "job.submitted",
        "at": "2025-10-09T08:53:20Z",
        "data": {"samples": 5},
    }


async def test_it_resumes_after_the_last_event_seen(http: aiohttp.ClientSession, job: str) -> None:
    for verb in ("pause", "resume", "cancel"):
        await http.post(f"/v1/jobs/{job}/{verb}")
    async with http.get(f"/v1/jobs/{job}/events?follow=false", headers={"Last-Event-ID": "2"}) as answer:
        assert [m["event"] async for m in messages(answer)] == ["job.resumed", "job.cancelled"]


async def test_it_follows_what_comes(http: aiohttp.ClientSession, job: str) -> None:
    async with asyncio.timeout(30), http.get(f"/v1/jobs/{job}/events") as answer:
        stream = messages(answer)
        assert (await anext(stream))["event"] == "job.submitted"
        await http.post(f"/v1/jobs/{job}/pause")
        assert (await anext(stream))["event"] == "job.paused"


async def test_a_long_log_is_sent_in_batches(
    http: aiohttp.ClientSession, service: FakeService, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "BATCH", 2)
    for number in range(6):
        await service.ledger.append_event(job, "job.progress", {"number": number}, at=0)
    async with http.get(f"/v1/jobs/{job}/events?follow=false") as answer:
        assert [m["id"] async for m in messages(answer)] == ["1", "2", "3", "4", "5", "6", "7"]


@pytest.mark.parametrize("last", ["x", "-1", "²"])
async def test_a_strange_last_event_id_is_refused(http: aiohttp.ClientSession, job: str, last: str) -> None:
    async with http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": last}) as answer:
        assert (answer.status, (await answer.json())["field"]) == (400, "Last-Event-ID")


async def test_shutting_down_ends_open_streams(service: FakeService) -> None:
    async with asyncio.timeout(30), aiohttp.ClientSession() as http:
        async with serving(service) as url:
            headers = {"Content-Type": "application/x-ndjson"}
            await http.post(f"{url}/v1/datasets", data=b'{"input_ids": [1]}', headers=headers)
            await http.post(f"{url}/v1/jobs", json={"dataset": "ds1", "store": "s"})
            answer = await http.get(f"{url}/v1/jobs/job1/events")
            stream = messages(answer)
            await anext(stream)
        assert await anext(stream, None) is None


async def test_a_fault_in_mid_stream_ends_it_and_is_logged(http: aiohttp.ClientSession, service: FakeService, job: str) -> None:
    async def fail(job: str, after: int, *, timeout_seconds: float) -> None:
        raise RuntimeError("lost")

    service.jobs.wait_for_event = fail
    async with asyncio.timeout(30), http.get(f"/v1/jobs/{job}/events") as answer:
        assert [m["event"] async for m in messages(answer)] == ["job.submitted"]
    assert service.logged[-1]["event"] == "api.request_failed"
