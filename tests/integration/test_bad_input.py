"""Each case of contract §4, against a running service: the error names line and field, and nothing is kept."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.cluster import Cluster, cluster, small_model, token_samples
from tests.fakes.datasets import make_tokenizer

PROBLEM = "application/problem+json"
NDJSON = {"Content-Type": "application/x-ndjson"}
GOOD = {"id": "good", "input_ids": [1, 2, 3]}
IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]

# What stands on the second line of a dataset whose first is good, and the field that the error names.
BAD_LINES: dict[str, tuple[Any, str | None]] = {
    "not JSON": ("{", None),
    "not an object": ([1, 2], None),
    "no form": ({"id": "a"}, None),
    "two forms": ({"input_ids": [1], "text": "a"}, None),
    "an id outside the vocabulary": ({"input_ids": [1, 1024]}, "input_ids"),
    "a negative id": ({"input_ids": [-1]}, "input_ids"),
    "an id that is no integer": ({"input_ids": [1.5]}, "input_ids"),
    "lengths that differ": ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask"),
    "a mask of other values": ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask"),
    "an all-zero mask": ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "loss_mask"),
    "no tokens": ({"input_ids": []}, "input_ids"),
    "an empty text": ({"text": ""}, "text"),
    "a repeated id": ({"id": "good", "input_ids": [4]}, "id"),
    "no messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "oracle", "content": "a"}]}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "content": "a"}]}, "messages"),
    "no assistant turn": ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    "ShareGPT without value": ({"conversations": [{"from": "human"}]}, "conversations"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = small_model(tmp_path_factory.mktemp("model") / "llama")
    config = (model / "config.json").read_bytes()
    make_tokenizer(model)
    (model / "config.json").write_bytes(config)
    with cluster(tmp_path_factory.mktemp("cluster"), model) as made:
        made.start_worker("w", "--layers", "0,1", "--context-length", "64", "--budget-bytes", str(64 << 20))
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
        yield made


@pytest.fixture
def http(made: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=made.url, timeout=60) as client:
        yield client


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.headers["Content-Type"].startswith(PROBLEM), response.text
    assert (response.status_code, response.json()["status"]) == (status, status), response.text
    return dict(response.json())


def lines(*objects: Any) -> bytes:
    return b"".join((o if isinstance(o, str) else json.dumps(o)).encode() + b"\n" for o in objects)


@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(http: httpx.Client, case: str, gzipped: bool) -> None:
    line, field = BAD_LINES[case]
    body = lines(GOOD, line)
    headers = NDJSON | ({"Content-Encoding": "gzip"} if gzipped else {})
    before = http.get("/v1/datasets").json()["items"]
    told = problem(http.post("/v1/datasets", content=gzip.compress(body) if gzipped else body, headers=headers), 400)
    assert told["line"] == 2, told
    if field is not None:
        assert told["field"].startswith(field), told
    assert told["detail"]
    assert http.get("/v1/datasets").json()["items"] == before


def test_an_empty_body_is_no_dataset(http: httpx.Client) -> None:
    problem(http.post("/v1/datasets", content=b"", headers=NDJSON), 400)


def test_a_path_outside_of_the_dataset_roots_is_refused(http: httpx.Client) -> None:
    told = problem(http.post("/v1/datasets", json={"path": "/etc/passwd"}), 400)
    assert told["field"] == "path"


def test_an_unknown_model_is_refused(http: httpx.Client) -> None:
    problem(http.post("/v1/datasets?model=nobody/knows", content=lines(GOOD), headers=NDJSON), 400)


@pytest.fixture
def dataset(http: httpx.Client) -> str:
    samples = [*token_samples(5, longest=20), {"id": "long", "input_ids": list(range(80))}]
    return str(http.post("/v1/datasets", content=lines(*samples), headers=NDJSON).json()["id"])


def test_an_over_long_sample_is_named_when_the_job_is_submitted(http: httpx.Client, dataset: str) -> None:
    told = problem(http.post("/v1/jobs", json={"dataset": dataset, "store": "a.zarr"}), 400)
    assert (told["line"], told["field"]) == (6, "on_over_long")
    assert "'long'" in told["detail"]
    assert "truncate" in told["detail"]


@pytest.mark.parametrize(
    ("job", "status", "field"),
    [
        ({"dataset": "nothing"}, 400, "dataset"),
        ({"store": "/etc/store"}, 400, "store"),
        ({"store": "../outside"}, 400, "store"),
        ({"capture": {"aux_layer_ids": [3]}}, 409, "capture"),
        ({"capture": {"final": "none"}}, 409, "capture"),
        ({"capture": {"preset": "speculators"}}, 409, "capture"),
        ({"placement": {"rows_per_shard": 100, "rows_per_chunk": 64}}, 400, "placement"),
        ({"placement": {"rows_per_shard": 0}}, 400, "placement.rows_per_shard"),
        ({"placment": {}}, 400, "placment"),
        ({"on_over_long": "cut"}, 400, "on_over_long"),
        ({"placement": {"rows_per_shard": 1 << 30, "rows_per_chunk": 1 << 30}}, 507, "store"),
    ],
)
def test_a_job_that_cannot_be_is_refused(http: httpx.Client, dataset: str, job: dict[str, Any], status: int, field: str) -> None:
    asked = {"dataset": dataset, "store": "b.zarr", "on_over_long": "skip", **job}
    told = problem(http.post("/v1/jobs", json=asked), status)
    assert told["field"] == field, told
    assert http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(("policy", "status", "length"), [("truncate", "stored", 63), ("skip", "skipped", 80)])
def test_over_long_samples_are_cut_or_left_out_on_request(
    made: Cluster, http: httpx.Client, dataset: str, policy: str, status: str, length: int
) -> None:
    job = http.post("/v1/jobs", json={"dataset": dataset, "store": f"{policy}.zarr", "on_over_long": policy}).json()
    with made.client() as client:
        assert client.wait(job["id"], poll_seconds=0.05).state == "completed"
        (long,) = [sample for sample in client.samples(job["id"]) if sample.id == "long"]
    assert (long.status, long.length) == (status, length)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("PUT", "/v1/jobs", 405), ("GET", "/v1/jobs/x", 404)]
)
def test_what_is_not_there_is_a_problem_too(http: httpx.Client, method: str, path: str, status: int) -> None:
    problem(http.request(method, path), status)
