"""Jobs over HTTP: submission, idempotency, steering, samples."""

from __future__ import annotations

import aiohttp
import pytest
from statetap.core.spec import Compression, Final, Identity
from statetap.runtime.views import JobSubmission

from tests.fakes.api_server import FakeService


async def test_a_submission_reaches_the_runtime_whole(http: aiohttp.ClientSession, service: FakeService, dataset: str) -> None:
    asked = {
        "dataset": dataset,
        "store": "s.zarr",
        "name": "night run",
        "priority": 7,
        "capture": {"preset": "eagle3", "aux_layer_ids": [1, 14, 26], "final": "both", "identity": "count"},
        "placement": {"order": "permutation", "seed": 3, "rows_per_shard": 2048, "rows_per_chunk": 64},
        "compression": "zstd",
        "on_over_long": "truncate",
        "ignore_space": True,
    }
    async with http.post("/v1/jobs", json=asked) as answer:
        body = await answer.json()
        assert answer.status == 202
        assert answer.headers["Location"] == f"/v1/jobs/{body['id']}"
    assert service.jobs.submissions == [
        JobSubmission(
            dataset=dataset,
            store="s.zarr",
            name="night run",
            priority=7,
            preset="eagle3",
            aux_layer_ids=(1, 14, 26),
            final=Final.BOTH,
            identity=Identity.COUNT,
            order="permutation",
            seed=3,
            rows_per_shard=2048,
            rows_per_chunk=64,
            compression=Compression.ZSTD,
            on_over_long="truncate",
            ignore_space=True,
        )
    ]
    assert body["progress"]["samples"] == {"total": 5, "pending": 5, "stored": 0, "failed": 0, "cancelled": 0, "skipped": 0}
    assert (body["state"], body["final"], body["identity"], body["finished_at"]) == ("running", "both", "count", None)
    assert body["compression"] == "zstd"


async def test_a_minimal_submission_leaves_the_rest_to_the_runtime(service: FakeService, job: str) -> None:
    assert service.jobs.submissions == [JobSubmission(dataset="ds1", store="s.zarr")]


async def test_an_idempotency_key_is_good_for_one_request(
    http: aiohttp.ClientSession, service: FakeService, dataset: str
) -> None:
    key = {"Idempotency-Key": "once"}
    first = await http.post(
        "/v1/jobs", data=f'{{"dataset":"{dataset}","store":"s"}}', headers=key | {"Content-Type": "application/json"}
    )
    again = await http.post("/v1/jobs", json={"store": "s", "dataset": dataset, "priority": 0}, headers=key)
    other = await http.post("/v1/jobs", json={"store": "t", "dataset": dataset}, headers=key)
    assert (first.status, again.status, other.status) == (202, 202, 409)
    assert (await first.json())["id"] == (await again.json())["id"]
    assert (await other.json())["field"] == "Idempotency-Key"
    assert len(service.jobs.submissions) == 1


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_bad_idempotency_key_is_refused(http: aiohttp.ClientSession, dataset: str, key: str) -> None:
    answer = await http.post("/v1/jobs", json={"dataset": dataset, "store": "s"}, headers={"Idempotency-Key": key})
    assert (answer.status, (await answer.json())["field"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(("store", "status", "field"), [("full", 507, None), ("bad", 400, "store")])
async def test_the_runtimes_refusals_have_their_statuses(
    http: aiohttp.ClientSession, dataset: str, store: str, status: int, field: str | None
) -> None:
    answer = await http.post("/v1/jobs", json={"dataset": dataset, "store": store})
    body = await answer.json()
    assert (answer.status, body["status"], body.get("field")) == (status, status, field)


async def test_without_a_worker_a_job_conflicts(http: aiohttp.ClientSession, service: FakeService, dataset: str) -> None:
    service.jobs.has_workers = False
    answer = await http.post("/v1/jobs", json={"dataset": dataset, "store": "s"})
    assert answer.status == 409


async def test_steering_moves_the_state_or_conflicts(http: aiohttp.ClientSession, job: str) -> None:
    seen = []
    for verb in ("pause", "pause", "resume", "cancel", "retry"):
        answer = await http.post(f"/v1/jobs/{job}/{verb}")
        seen.append((verb, answer.status, (await answer.json()).get("state")))
    assert seen == [
        ("pause", 200, "paused"),
        ("pause", 409, None),
        ("resume", 200, "running"),
        ("cancel", 200, "cancelled"),
        ("retry", 409, None),
    ]


async def test_a_finished_job_tells_failures_and_workers(http: aiohttp.ClientSession, service: FakeService, job: str) -> None:
    await service.jobs.finish(job, failed=2)
    body = await (await http.get(f"/v1/jobs/{job}")).json()
    assert body["failures"] == {"non-finite states": 2}
    assert body["workers"] == {"w0": {"stored": 3, "attempts": 5, "lost": 2}}
    assert body["progress"]["bytes_stored"] == 9 * 4608
    assert body["finished_at"] == "2025-10-09T08:54:20Z"


async def test_a_job_tells_the_norms_of_its_layers(http: aiohttp.ClientSession, service: FakeService, job: str) -> None:
    assert (await (await http.get(f"/v1/jobs/{job}")).json())["layer_norms"] == {}
    await service.jobs.finish(job)
    norms = (await (await http.get(f"/v1/jobs/{job}")).json())["layer_norms"]
    assert list(norms) == ["aux_hidden_states", "last_hidden_states"]
    assert [(line["layer"], line["rows"]) for line in norms["aux_hidden_states"]] == [
        (layer, rows) for layer in (1, 14, 26) for rows in ("first", "later")
    ]
    assert norms["aux_hidden_states"][2] == {
        "layer": 14,
        "rows": "first",
        "count": 4,
        "min": 20.0,
        "mean": 2000.0,
        "max": 4000.0,
    }
    assert norms["last_hidden_states"] == [{"layer": None, "rows": "first", "count": 4, "min": 1.5, "mean": 2.0, "max": 2.5}]


async def test_samples_are_paged_and_chosen_by_status(http: aiohttp.ClientSession, service: FakeService, job: str) -> None:
    await service.jobs.finish(job, failed=2)
    first = await (await http.get(f"/v1/jobs/{job}/samples", params={"limit": 4})).json()
    assert [s["index"] for s in first["items"]] == [0, 1, 2, 3]
    assert first["items"][0] == {
        "index": 0,
        "id": "1",
        "status": "stored",
        "reason": None,
        "attempts": 1,
        "worker": "w0",
        "row_start": 0,
        "length": 3,
        "digest": "0000000000000abc",
    }
    failed = await (await http.get(f"/v1/jobs/{job}/samples?status=failed")).json()
    assert [(s["id"], s["reason"], s["digest"]) for s in failed["items"]] == [
        ("4", "non-finite states", None),
        ("5", "non-finite states", None),
    ]


async def test_jobs_are_listed_newest_first(http: aiohttp.ClientSession, dataset: str) -> None:
    for store in "ab":
        await http.post("/v1/jobs", json={"dataset": dataset, "store": store})
    body = await (await http.get("/v1/jobs")).json()
    assert [j["store"] for j in body["items"]] == ["b", "a"]
