"""What never reaches the application is a problem document too."""

from __future__ import annotations

import asyncio
import json
import logging

import aiohttp
import pytest

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


async def exchange(http: aiohttp.ClientSession, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are; status, headers and body of the first answer. The connection must be closed after it."""
    reader, writer = await asyncio.open_connection(http._base_url.host, http._base_url.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(30):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", "not HTTP/1.1"),
        (b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n", "not HTTP/1.1"),
        (b"G\x01T / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not HTTP/1.1"),
        (REQUEST + b"Bad Header: x\r\n\r\n", "not HTTP/1.1"),
        (REQUEST + b"X: a\x00b\r\n\r\n", "not HTTP/1.1"),
        (REQUEST + b"Content-Length: x\r\n\r\n", "not HTTP/1.1"),
        (REQUEST + b"Content-Length: -1\r\n\r\n", "not HTTP/1.1"),
        (REQUEST + b"Content-Length: 99999999999999999999999\r\n\r\n", "not HTTP/1.1"),
        (REQUEST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", "not HTTP/1.1"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "longer than the service reads"),
        (REQUEST + b"X: " + b"a" * 20_000 + b"\r\n\r\n", "longer than the service reads"),
    ],
)
async def test_what_cannot_be_read_is_a_problem(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, raw: bytes, told: str
) -> None:
    with caplog.at_level(logging.DEBUG, "aiohttp.server"):
        status, headers, body = await exchange(http, raw)
    problem = json.loads(body)
    assert (status, headers["Content-Type"], problem["status"]) == (400, "application/problem+json", 400)
    assert told in problem["detail"]
    assert caplog.records == [], "anybody could fill the log"
    assert (await http.get("/healthz")).status == 200


async def test_an_expectation_that_is_not_met_is_a_problem(http: aiohttp.ClientSession) -> None:
    for path in ("/v1/jobs", "/nowhere"):
        raw = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        status, headers, _ = await exchange(http, raw.encode())
        assert (status, headers["Content-Type"]) == (417, "application/problem+json"), path


@pytest.mark.parametrize(
    "target", ["*", "http://evil.example/v1/jobs", "/%00", "/%ff", "/v1/jobs/%2e%2e%2f", "//", "/v1/jobs/?x"]
)
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "CONNECT", "TRACE", "POST"])
async def test_odd_targets_are_problems(http: aiohttp.ClientSession, method: str, target: str) -> None:
    raw = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    status, headers, _ = await exchange(http, raw.encode())
    assert 200 <= status < 500
    if status >= 400:
        assert headers["Content-Type"] == "application/problem+json"
