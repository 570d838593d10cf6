"""Workers over HTTP."""

from __future__ import annotations

import aiohttp
import pytest

from tests.fakes.api_server import FakeService

PLUGIN = {"name": "gpu-0", "url": "http://127.0.0.1:30000", "dumps": {"kind": "plugin", "dir": "/dev/shm/statetap"}}
PLAIN = {
    "name": "old-0",
    "url": "http://127.0.0.1:30001",
    "dumps": {
        "kind": "plain",
        "dir": "/dev/shm/plain",
        "aux_layer_ids": [1, 14, 26],
        "final": "post_norm",
        "model_path": "org/model",
        "model_fingerprint": "f",
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "dtype": "bfloat16",
    },
}


async def test_a_worker_comes_and_goes(http: aiohttp.ClientSession) -> None:
    added = await http.post("/v1/workers", json=PLUGIN)
    body = await added.json()
    assert added.status == 201
    assert (body["name"], body["state"], body["in_flight"], body["model_path"]) == ("gpu-0", "ready", 1, "org/model")
    assert body["dumps"] == PLUGIN["dumps"]
    drained = await http.post("/v1/workers/gpu-0/drain")
    assert (await drained.json())["state"] == "draining"
    removed = await http.delete("/v1/workers/gpu-0")
    assert (removed.status, await removed.read()) == (204, b"")
    assert await (await http.get("/v1/workers")).json() == {"items": [], "cursor": None}


async def test_plain_dumps_are_kept_as_declared(http: aiohttp.ClientSession) -> None:
    added = await http.post("/v1/workers", json=PLAIN)
    assert added.status == 201
    (worker,) = (await (await http.get("/v1/workers")).json())["items"]
    assert worker["dumps"] | PLAIN["dumps"] == worker["dumps"]
    assert worker["dumps"]["published_by"] == "rename"


async def test_a_name_is_taken_once(http: aiohttp.ClientSession) -> None:
    await http.post("/v1/workers", json=PLUGIN)
    again = await http.post("/v1/workers", json=PLUGIN)
    assert (again.status, (await again.json())["field"]) == (409, "name")


async def test_a_worker_without_dumps_is_refused(http: aiohttp.ClientSession) -> None:
    answer = await http.post("/v1/workers", json={"name": "a b", "url": "ftp://x"})
    assert answer.status == 400
    assert {e["field"] for e in (await answer.json())["errors"]} == {"name", "url", "dumps"}


async def test_a_rate_limit_is_kept(http: aiohttp.ClientSession, service: FakeService) -> None:
    answer = await http.post("/v1/workers", json=PLUGIN | {"requests_per_second": 2})
    assert (await answer.json())["requests_per_second"] == 2
    assert [record.requests_per_second for record in service.workers.records.values()] == [2]


async def test_a_workers_key_is_kept_and_never_told(http: aiohttp.ClientSession, service: FakeService) -> None:
    answer = await http.post("/v1/workers", json=PLUGIN | {"api_key": "hunter2"})
    assert (await answer.json())["has_api_key"] is True
    assert service.workers.records["gpu-0"].api_key == "hunter2"
    told = [await answer.text(), await (await http.post("/v1/workers/gpu-0/drain")).text()]
    told += [await (await http.get(path)).text() for path in ("/v1/workers", "/", "/metrics")]
    told += [repr(service.workers.list()), repr(service.logged)]
    assert [text for text in told if "hunter2" in text] == []
    assert service.workers.records["gpu-0"].api_key == "hunter2"


@pytest.mark.parametrize(
    "sent", [{"api_key": "hunter2\r\nX: y"}, {"api_key": "hunter2 "}, {"url": "http://me:hunter2@127.0.0.1:1"}]
)
async def test_a_secret_that_cannot_be_used_is_refused_untold(
    http: aiohttp.ClientSession, service: FakeService, sent: dict[str, str]
) -> None:
    answer = await http.post("/v1/workers", json=PLUGIN | sent)
    assert (answer.status, (await answer.json())["field"]) == (400, next(iter(sent)))
    assert "hunter2" not in await answer.text() + repr(service.logged)
