"""What every `InferenceClient` does: run over the fake, and over `SglangClient` talking to a real server on the loopback."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from statetap.adapters.inference.sglang import SglangClient
from statetap.ports import (
    GenerateSample,
    InferenceClient,
    RequestRefused,
    RequestTimedOut,
    ServerFacts,
    WorkerUnreachable,
)

from tests.fakes.inference import FakeInferenceClient, Hang, Refuse, Unreachable


class Worker(Protocol):
    """A worker behind a client, and what can befall it."""

    client: InferenceClient

    async def hang(self) -> None: ...
    async def refuse(self, status: int, message: str) -> None: ...
    async def break_off(self) -> None: ...
    async def go_down(self) -> None: ...
    async def stop(self) -> None: ...
    def aborted(self) -> list[str]: ...


class FakeWorker:
    def __init__(self) -> None:
        self.client = FakeInferenceClient()

    async def hang(self) -> None:
        self.client.script.append(Hang())

    async def refuse(self, status: int, message: str) -> None:
        self.client.script.append(Refuse(status, message))

    async def break_off(self) -> None:
        self.client.script.append(Unreachable("connection reset"))

    async def go_down(self) -> None:
        self.client.up = False

    async def stop(self) -> None:
        await self.client.close()

    def aborted(self) -> list[str]:
        return self.client.aborted


class HttpWorker:
    """SGLang's interface as 0.5.23 answers it, with a real socket under it."""

    def __init__(self) -> None:
        self._aborted: list[str] = []
        self._fault: Any = None
        self._end = asyncio.Event()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/ping", self._ping)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        self._server = TestServer(app, host="127.0.0.1")
        await self._server.start_server()
        self.client = SglangClient(str(self._server.make_url("/")))

    async def hang(self) -> None:
        self._fault = "hang"

    async def refuse(self, status: int, message: str) -> None:
        self._fault = (status, message)

    async def break_off(self) -> None:
        self._fault = "break off"

    async def go_down(self) -> None:
        await self._server.close()

    async def stop(self) -> None:
        self._end.set()
        await self.client.close()
        await self._server.close()

    def aborted(self) -> list[str]:
        return self._aborted

    async def _generate(self, request: web.Request) -> web.Response:
        fault, self._fault = self._fault, None
        if fault == "hang":
            await self._end.wait()
        elif fault == "break off":
            assert request.transport is not None
            request.transport.abort()
        elif fault is not None:
            return web.json_response({"error": {"message": fault[1]}}, status=fault[0])
        body = await request.json()
        if isinstance(body["rid"], str):
            return web.json_response(_answer(body["rid"], body["input_ids"]))
        return web.json_response([_answer(rid, ids) for rid, ids in zip(body["rid"], body["input_ids"], strict=True)])

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.append((await request.json())["rid"])
        return web.Response()

    async def _ping(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "context_length": 4096})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/tiny"})


def _answer(rid: str, ids: list[int]) -> dict[str, Any]:
    meta = {"id": rid, "prompt_tokens": len(ids), "cached_tokens": 0, "finish_reason": {"type": "length", "length": 1}}
    return {"text": "", "output_ids": [7], "meta_info": meta}


@pytest.fixture(params=["fake", "http"])
async def worker(request):
    worker: Worker
    if request.param == "fake":
        worker = FakeWorker()
    else:
        worker = HttpWorker()
        await worker.start()
    yield worker
    await worker.stop()


def sample(rid: str, length: int = 3) -> GenerateSample:
    return GenerateSample(rid, np.arange(length, dtype=np.int32), f"key-{rid}")


async def test_one_sample_is_answered(worker: Worker):
    [answer] = await worker.client.generate([sample("a")], timeout_seconds=30)
    assert (answer.rid, answer.prompt_tokens, answer.cached_tokens, answer.next_token) == ("a", 3, 0, 7)


async def test_several_samples_are_answered_in_order(worker: Worker):
    answers = await worker.client.generate([sample("a", 3), sample("b", 5), sample("c", 4)], timeout_seconds=30)
    assert [(answer.rid, answer.prompt_tokens) for answer in answers] == [("a", 3), ("b", 5), ("c", 4)]


async def test_a_request_without_samples_is_a_mistake(worker: Worker):
    with pytest.raises(ValueError, match="at least one"):
        await worker.client.generate([], timeout_seconds=30)


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_carries_status_and_message(worker: Worker, status: int):
    await worker.refuse(status, "the input is too long")
    with pytest.raises(RequestRefused, match="the input is too long") as caught:
        await worker.client.generate([sample("a")], timeout_seconds=30)
    assert (caught.value.status, caught.value.message) == (status, "the input is too long")


async def test_silence_ends_at_the_time_out_and_the_client_can_be_used_again(worker: Worker):
    await worker.hang()
    with pytest.raises(RequestTimedOut, match=r"0\.05 s"):
        await worker.client.generate([sample("a")], timeout_seconds=0.05)
    [answer] = await worker.client.generate([sample("b")], timeout_seconds=30)
    assert answer.rid == "b"


async def test_a_broken_connection_is_an_unreachable_worker(worker: Worker):
    await worker.break_off()
    with pytest.raises(WorkerUnreachable):
        await worker.client.generate([sample("a")], timeout_seconds=30)


async def test_a_worker_that_is_down_is_unreachable(worker: Worker):
    assert await worker.client.is_up()
    await worker.go_down()
    assert not await worker.client.is_up()
    with pytest.raises(WorkerUnreachable):
        await worker.client.generate([sample("a")], timeout_seconds=30)
    with pytest.raises(WorkerUnreachable):
        await worker.client.server_facts()


async def test_abort_names_the_request(worker: Worker):
    await worker.client.abort("a")
    assert worker.aborted() == ["a"]


async def test_server_facts(worker: Worker):
    assert await worker.client.server_facts() == ServerFacts("0.5.23", "/models/tiny", 4096)
