"""Datasets over HTTP: streamed, gzipped, by path; and what is said of those that are refused."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.api_server import FakeService

NDJSON = {"Content-Type": "application/x-ndjson"}
GZIPPED = NDJSON | {"Content-Encoding": "gzip"}
LINES = b'{"input_ids": [1, 2]}\n{"input_ids": [3, 4, 5]}\n'


async def test_ndjson_is_taken_and_told_where_it_is(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/datasets?name=pairs&model=org/other", data=LINES, headers=NDJSON) as answer:
        body = await answer.json()
        assert answer.status == 201
        assert answer.headers["Location"] == f"/v1/datasets/{body['id']}"
        assert (body["name"], body["model"], body["samples"], body["tokens"], body["max_tokens"]) == (
            "pairs",
            "org/other",
            2,
            5,
            3,
        )
        assert body["created_at"] == "2025-10-09T08:53:20Z"
    async with http.get(answer.headers["Location"]) as shown:
        assert await shown.json() == body


async def test_gzip_reaches_the_dataset_port_as_it_was_sent(http: aiohttp.ClientSession, service: FakeService) -> None:
    async with http.post("/v1/datasets", data=gzip.compress(LINES), headers=GZIPPED) as answer:
        assert answer.status == 201
        assert (await answer.json())["samples"] == 2
    assert service.datasets.received_gzipped


async def test_the_limit_counts_bytes_as_sent(http: aiohttp.ClientSession) -> None:
    lines = LINES * 5_000
    async with http.post("/v1/datasets", data=gzip.compress(lines), headers=GZIPPED) as answer:
        assert (answer.status, (await answer.json())["samples"]) == (201, 10_000)
    async with http.post("/v1/datasets", data=lines, headers=NDJSON) as answer:
        body = await answer.json()
        assert (answer.status, body["title"]) == (413, "Request Entity Too Large")
        assert "100000 bytes" in body["detail"]


async def test_a_body_that_says_that_it_is_too_large_is_not_waited_for(http: aiohttp.ClientSession) -> None:
    reader, writer = await asyncio.open_connection(http._base_url.host, http._base_url.port)
    head = b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    writer.write(head + b"Content-Length: 9223372036854775807\r\n\r\n")
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_chunked_body_is_read_as_it_comes(http: aiohttp.ClientSession) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for byte in range(0, len(LINES), 7):
            yield LINES[byte : byte + 7]

    async with http.post("/v1/datasets", data=chunks(), headers=NDJSON) as answer:
        assert (await answer.json())["samples"] == 2


@pytest.mark.parametrize(
    ("lines", "line", "field", "detail"),
    [
        (b'{"input_ids": [1]}\n{"input_ids": []}\n', 2, "input_ids", "line 2, field 'input_ids': an empty sequence"),
        (b"{", 1, None, "line 1: not JSON"),
        (b'{"input_ids": [1], "loss_mask": [0]}', 1, "loss_mask", "line 1, field 'loss_mask': no token to train on"),
    ],
)
async def test_a_refused_dataset_names_line_and_field(
    http: aiohttp.ClientSession, service: FakeService, lines: bytes, line: int, field: str | None, detail: str
) -> None:
    async with http.post("/v1/datasets", data=lines, headers=NDJSON) as answer:
        body = await answer.json()
        assert (answer.status, answer.content_type) == (400, "application/problem+json")
        assert (body["line"], body.get("field"), body["detail"], body["status"]) == (line, field, detail, 400)
    assert service.ledger.dataset_records == {}
    assert service.logged[-1]["event"] == "dataset.refused"


async def test_an_empty_mask_may_be_allowed(http: aiohttp.ClientSession) -> None:
    body = b'{"input_ids": [1], "loss_mask": [0]}'
    async with http.post("/v1/datasets?allow_empty_mask=true", data=body, headers=NDJSON) as answer:
        assert answer.status == 201


async def test_a_file_below_the_root_is_named_after_itself(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(LINES))
    async with http.post("/v1/datasets", json={"path": "pairs.jsonl.gz"}) as answer:
        assert (answer.status, (await answer.json())["name"]) == (201, "pairs")
    async with http.post("/v1/datasets", json={"path": "absent.jsonl"}) as answer:
        body = await answer.json()
        assert (answer.status, body["field"]) == (400, "path")
        assert "line" not in body


async def test_lists_are_paged(http: aiohttp.ClientSession) -> None:
    for name in "abc":
        await http.post(f"/v1/datasets?name={name}", data=LINES, headers=NDJSON)
    async with http.get("/v1/datasets?limit=2") as answer:
        first = await answer.json()
    async with http.get("/v1/datasets", params={"limit": 2, "cursor": first["cursor"]}) as answer:
        last = await answer.json()
    assert [d["name"] for d in first["items"] + last["items"]] == ["a", "b", "c"]
    assert last["cursor"] is None


async def test_deleting_asks_the_ledger_first(http: aiohttp.ClientSession, service: FakeService, dataset: str, job: str) -> None:
    async with http.delete(f"/v1/datasets/{dataset}") as answer:
        assert answer.status == 409
        assert job in (await answer.json())["detail"]
    assert service.datasets.deleted == []
    await service.jobs.finish(job)
    async with http.delete(f"/v1/datasets/{dataset}") as answer:
        assert (answer.status, await answer.read()) == (204, b"")
    assert service.datasets.deleted == [dataset]
    async with http.get(f"/v1/datasets/{dataset}") as answer:
        assert answer.status == 404


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Content-Type": "text/csv"}, "Content-Type"),
        (NDJSON | {"Content-Encoding": "br"}, "Content-Encoding"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "Content-Encoding"),
    ],
)
async def test_other_media_types_are_refused(http: aiohttp.ClientSession, headers: dict[str, str], field: str) -> None:
    async with http.post("/v1/datasets", data=b"{}", headers=headers) as answer:
        assert (answer.status, (await answer.json())["field"]) == (415, field)


async def test_a_client_that_leaves_is_no_fault_of_the_service(http: aiohttp.ClientSession, service: FakeService) -> None:
    """Its half-sent dataset isn't kept, the log has no failure, and the service goes on."""
    ended = asyncio.Event()
    ingest = service.datasets.ingest

    async def ingest_and_tell(*args: object, **kwargs: object) -> object:
        try:
            return await ingest(*args, **kwargs)
        finally:
            ended.set()

    service.datasets.ingest = ingest_and_tell
    base = http._base_url
    _, writer = await asyncio.open_connection(base.host, base.port)
    head = b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head + LINES)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(30):
        await ended.wait()
    async with http.get("/v1/datasets") as answer:
        assert (await answer.json())["items"] == []
    assert service.logged == []
