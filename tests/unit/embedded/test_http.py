from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from statetap import __version__
from statetap.embedded.http import WorkerApi
from statetap.embedded.model import TappedModel
from statetap.embedded.options import WorkerOptions
from statetap.embedded.outlets import PluginOutlet, PublishedRows
from statetap.embedded.scheduler import Scheduler
from statetap_sglang.reader import open_dump

Tokens = Callable[[int], tuple[int, ...]]
GREEDY = {"max_new_tokens": 1, "temperature": 0}


class HoldingOutlet(PluginOutlet):
    """Keeps the scheduler in the pass that publishes rows of the request `held` until `go_on`."""

    def __init__(self, model: TappedModel, options: WorkerOptions) -> None:
        super().__init__(model, options)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def publish(self, rows: PublishedRows) -> str | None:
        name = super().publish(rows)
        if rows.rid == "held":
            self.reached.set()
            assert self.go_on.wait(60)
        return name


@dataclass
class Worker:
    api: WorkerApi
    scheduler: Scheduler
    client: TestClient[Any, Any]
    outlet: HoldingOutlet

    @property
    def directory(self) -> Path:
        return self.outlet.directory

    async def generate(self, body: Any) -> tuple[int, Any]:
        async with self.client.post("/generate", json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as response:
            return response.status, await response.json() if response.content_type == "application/json" else None

    @property
    def dumps(self) -> list[tuple[str, int, list[int], int | None]]:
        """(rid, prefix length, token ids, prompt length) of every dump, in order."""
        found = []
        for path in sorted(self.directory.glob("req_*.safetensors"), key=lambda p: int(p.stem.removeprefix("req_"))):
            with open_dump(path) as dump:
                ids = np.frombuffer(dump.tensors["token_ids"].data, "<i4").tolist()
                found.append((dump.metadata.rid, dump.metadata.prefix_len, ids, dump.metadata.prompt_len))
        return found


def unexpected(error: Exception) -> None:
    raise AssertionError("the scheduler died") from error


@pytest.fixture
async def cold(llama: TappedModel, tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker that listens and has not warmed up."""
    options = WorkerOptions(model_path="some/model", dump_dir=tmp_path / "dumps", chunked_prefill_size=64)
    outlet = HoldingOutlet(llama, options)
    scheduler = Scheduler(llama, outlet, chunk_size=64, on_fatal=unexpected)
    scheduler.start()
    api = WorkerApi(llama, scheduler, options)
    server = TestServer(api.application())
    async with TestClient(server) as client:  # it cancels handlers whose client has gone, as `server` has it do
        yield Worker(api, scheduler, client, outlet)
        assert await asyncio.to_thread(scheduler.stop, 60)
    outlet.close()


@pytest.fixture
async def worker(cold: Worker) -> Worker:
    await cold.api.warm_up()
    return cold


async def test_until_the_warm_up_is_through_it_is_starting(cold: Worker) -> None:
    for path in ("/health", "/health_generate", "/ping", "/ready"):
        assert (await cold.get(path))[0] == 503
    assert (await cold.get("/server_info"))[1]["status"] == "starting"
    await cold.api.warm_up()
    assert (await cold.get("/ready"))[0] == (await cold.get("/ping"))[0] == 200
    assert (await cold.get("/server_info"))[1]["status"] == "ready"


async def test_the_warm_up_is_published_and_moves_the_counter(worker: Worker) -> None:
    [(rid, prefix_len, ids, prompt_len)] = worker.dumps
    assert (len(rid), prefix_len, ids, prompt_len) == (32, 0, [10, 11, 12], 3)
    await worker.generate({"input_ids": [5, 6], "sampling_params": GREEDY})
    with open_dump(worker.directory / "req_1.safetensors") as dump:
        assert dump.metadata.forward_pass == 9


async def test_a_health_check_runs_a_pass_of_its_own(worker: Worker) -> None:
    assert (await worker.get("/health"))[0] == (await worker.get("/health_generate"))[0] == 200
    checks = worker.dumps[1:]
    assert [ids for _, _, ids, _ in checks] == [[0], [0]]
    assert all(rid.startswith("HEALTH_CHECK_") for rid, _, _, _ in checks)


async def test_passive_health_runs_none(worker: Worker) -> None:
    before = worker.dumps
    assert (await worker.get("/ping"))[0] == (await worker.get("/ready"))[0] == 200
    assert worker.dumps == before


async def test_a_single_prompt_is_answered_as_sglang_does(worker: Worker, tokens: Tokens) -> None:
    prompt = list(tokens(90))
    status, answer = await worker.generate({"input_ids": prompt, "rid": "r", "sampling_params": GREEDY})
    assert status == 200
    assert len(answer["output_ids"]) == 1
    assert "text" not in answer
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 90,
        "cached_tokens": 0,
        "completion_tokens": 1,
        "num_retractions": 0,
        "statetap_dumps": [[f"{worker.directory.name}/req_1", f"{worker.directory.name}/req_2"]],
    }
    assert worker.dumps[1:] == [("r", 0, prompt[:64], 90), ("r", 64, prompt[64:], 90)]


async def test_a_batch_is_answered_in_its_order(worker: Worker, tokens: Tokens) -> None:
    prompts = [list(tokens(n)) for n in (30, 25, 40)]
    status, answers = await worker.generate({"input_ids": prompts, "rid": ["a", "b", "c"], "sampling_params": GREEDY})
    assert status == 200
    assert [(a["meta_info"]["id"], a["meta_info"]["prompt_tokens"]) for a in answers] == [("a", 30), ("b", 25), ("c", 40)]
    assert [(rid, start, len(ids)) for rid, start, ids, _ in worker.dumps[1:]] == [
        ("a", 0, 30),
        ("b", 0, 25),
        ("c", 0, 9),
        ("c", 9, 31),
    ]


@pytest.mark.parametrize("body", [{"input_ids": []}, {"input_ids": [1] * 600}, {"text": "no tokenizer"}, []])
async def test_a_bad_request_is_refused_in_sglangs_words(worker: Worker, body: Any) -> None:
    status, answer = await worker.generate(body)
    assert status == 400
    assert list(answer) == ["error"]
    assert answer["error"]["message"]
    assert len(worker.dumps) == 1


async def test_what_is_not_json_is_refused(worker: Worker) -> None:
    async with worker.client.post("/generate", data=b"{") as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]


async def test_a_duplicate_rid_in_flight_is_refused_and_an_abort_ends_the_first(worker: Worker) -> None:
    body = {"input_ids": [5, 6, 7], "rid": "held", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    first = asyncio.create_task(worker.generate(body))
    assert await asyncio.to_thread(worker.outlet.reached.wait, 60)
    status, answer = await worker.generate({"input_ids": [5], "rid": "held", "sampling_params": GREEDY})
    assert status == 400
    assert "Duplicate request ID" in answer["error"]["message"]
    assert (await worker.get("/health"))[0] == 200  # busy, so it runs no pass
    async with worker.client.post("/abort_request", json={"rid": "held"}) as response:
        assert (response.status, await response.read()) == (200, b"")
    worker.outlet.go_on.set()
    status, answer = await first
    assert status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert [rid for rid, *_ in worker.dumps[1:]] == ["held"]


async def test_aborting_the_unknown_answers_200(worker: Worker) -> None:
    async with worker.client.post("/abort_request", json={"rid": "nobody"}) as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_a_client_that_goes_away_aborts_its_request(worker: Worker) -> None:
    body = {"input_ids": [5, 6, 7], "rid": "held", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    request = asyncio.create_task(worker.generate(body))
    assert await asyncio.to_thread(worker.outlet.reached.wait, 60)
    sequence = worker.scheduler._in_flight["held"]
    request.cancel()
    async with asyncio.timeout(60):
        while not sequence.aborted:
            assert (await worker.get("/ping"))[0] == 200
    worker.outlet.go_on.set()
    answer = await asyncio.to_thread(sequence.future.result, 60)
    assert answer.finish_reason["type"] == "abort"
    assert (await worker.generate({"input_ids": [5], "sampling_params": GREEDY}))[0] == 200


async def test_the_server_tells_its_settings_by_sglangs_names(worker: Worker) -> None:
    status, info = await worker.get("/server_info")
    assert status == 200
    assert info == (await worker.get("/get_server_info"))[1]
    expected = {
        "model_path": "some/model",
        "served_model_name": "some/model",
        "disable_radix_cache": True,
        "chunked_prefill_size": 64,
        "context_length": 512,
        "dtype": "float32",
        "version": f"embedded-{__version__}",
    }
    assert {key: info[key] for key in expected} == expected
    assert (
        (await worker.get("/model_info"))[1]["model_path"]
        == (await worker.get("/get_model_info"))[1]["model_path"]
        == "some/model"
    )


async def test_loads_and_the_cache_flush_answer(worker: Worker) -> None:
    [load] = (await worker.get("/v1/loads"))[1]["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert (await worker.get("/flush_cache"))[0] == 200
    async with worker.client.post("/flush_cache") as response:
        assert response.status == 200
