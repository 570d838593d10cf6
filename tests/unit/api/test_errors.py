"""Every error is a problem document, whoever raised it."""

from __future__ import annotations

import aiohttp
import pytest
from statetap.core.records import DatasetRecord
from statetap.ports import BadCursor

from tests.fakes.api_server import FakeService

PROBLEM = "application/problem+json"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/jobs/absent", 404),
        ("GET", "/v1/jobs/absent/samples", 404),
        ("GET", "/v1/jobs/absent/events", 404),
        ("POST", "/v1/jobs/absent/pause", 404),
        ("GET", "/v1/datasets/absent", 404),
        ("DELETE", "/v1/datasets/absent", 404),
        ("DELETE", "/v1/workers/absent", 404),
        ("POST", "/v1/workers/absent/drain", 404),
        ("PUT", "/v1/jobs", 405),
        ("GET", "/v1/jobs?limit=0", 400),
        ("GET", "/v1/jobs?limit=1001", 400),
        ("GET", "/v1/jobs?limit=5&limit=6", 400),
        ("GET", "/v1/jobs?colour=red", 400),
        ("GET", "/v1/jobs/j/samples?status=lost", 400),
    ],
)
async def test_every_error_is_a_problem(http: aiohttp.ClientSession, method: str, path: str, status: int) -> None:
    async with http.request(method, path) as answer:
        body = await answer.json()
        assert (answer.status, answer.content_type, body["status"]) == (status, PROBLEM, status)
        assert body["type"] == "about:blank"
        assert body["title"]
        assert body["detail"]


async def test_405_says_what_is_allowed(http: aiohttp.ClientSession) -> None:
    answer = await http.put("/v1/jobs")
    assert {m.strip() for m in answer.headers["Allow"].split(",")} == {"GET", "HEAD", "POST"}


async def test_a_wrong_body_has_every_field_listed(http: aiohttp.ClientSession) -> None:
    answer = await http.post("/v1/jobs", json={"dataset": 5, "capture": {"final": "maybe"}, "colour": "red", "priority": 2000})
    body = await answer.json()
    assert answer.status == 400
    assert [e["field"] for e in body["errors"]] == ["dataset", "store", "priority", "capture.final", "colour"]
    assert body["field"] == "dataset"
    assert body["detail"].startswith("dataset: ")
    assert body["detail"].endswith("and 2 more")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff"])
async def test_a_body_that_is_no_object_is_refused(http: aiohttp.ClientSession, body: bytes) -> None:
    answer = await http.post("/v1/jobs", data=body, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.content_type) == (400, PROBLEM)


async def test_a_json_body_is_bounded(http: aiohttp.ClientSession) -> None:
    answer = await http.post("/v1/jobs", data=b"[" + b" " * 20_000 + b"]", headers={"Content-Type": "application/json"})
    assert (answer.status, answer.content_type) == (413, PROBLEM)


async def test_a_job_is_sent_as_json(http: aiohttp.ClientSession) -> None:
    answer = await http.post("/v1/jobs", data=b"{}", headers={"Content-Type": "application/x-ndjson"})
    assert (answer.status, answer.content_type) == (415, PROBLEM)


async def test_a_fault_is_logged_and_not_told(http: aiohttp.ClientSession, service: FakeService) -> None:
    service.ledger.broken = RuntimeError("the password is swordfish")
    answer = await http.get("/v1/jobs/any")
    assert (answer.status, answer.content_type) == (500, PROBLEM)
    assert "swordfish" not in await answer.text()
    (entry,) = service.logged
    assert (entry["event"], entry["path"], entry["log_level"]) == ("api.request_failed", "/v1/jobs/any", "error")
    assert "swordfish" in entry["error"]


async def test_a_lost_connection_behind_the_service_is_a_fault(http: aiohttp.ClientSession, service: FakeService) -> None:
    """Only the client's own leaving is passed over in silence."""
    service.ledger.broken = ConnectionRefusedError("no worker there")
    assert (await http.get("/v1/jobs/any")).status == 500
    assert service.logged[-1]["event"] == "api.request_failed"


async def test_a_bad_cursor_is_the_requests_fault(http: aiohttp.ClientSession, service: FakeService) -> None:
    service.ledger.broken = BadCursor("the cursor 'x' is none of this list's")
    answer = await http.get("/v1/jobs/any/samples?cursor=x")
    assert (answer.status, (await answer.json())["field"]) == (400, "cursor")


async def test_a_failure_to_record_a_dataset_is_a_fault(http: aiohttp.ClientSession, service: FakeService) -> None:
    async def fail(record: DatasetRecord) -> None:
        raise OSError(28, "No space left on device")

    service.ledger.add_dataset = fail
    answer = await http.post("/v1/datasets", data=b'{"input_ids": [1]}', headers={"Content-Type": "application/x-ndjson"})
    assert answer.status == 500


async def test_head_answers_like_get_without_a_body(http: aiohttp.ClientSession, job: str) -> None:
    for path, status in ((f"/v1/jobs/{job}", 200), ("/v1/jobs/absent", 404), ("/healthz", 200)):
        async with http.head(path) as answer:
            assert (answer.status, await answer.read()) == (status, b"")
