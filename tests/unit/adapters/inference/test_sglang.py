"""`SglangClient` beyond the contract suite: what it sends, which pages it asks, and answers that are no SGLang's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from statetap.adapters.inference import sglang
from statetap.adapters.inference.sglang import SglangClient, generate_body
from statetap.ports import GenerateSample, RequestRefused, ServerFacts, WorkerUnreachable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def text(body: str, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, content_type="application/json")

    return handler


@pytest.fixture
async def serve():
    running: list[tuple[TestServer, SglangClient]] = []

    async def start(pages: dict[str, Handler]) -> tuple[SglangClient, list[str]]:
        asked: list[str] = []

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked.append(request.path)
            return await handler(request)

        app = web.Application(middlewares=[note])
        for path, handler in pages.items():
            app.router.add_route("*", path, handler)
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        client = SglangClient(str(server.make_url("/")))
        running.append((server, client))
        return client, asked

    yield start
    for server, client in running:
        await client.close()
        await server.close()


SAMPLE = GenerateSample("a", np.array([1, 2, 3], np.int32), "k")


def test_one_sample_is_sent_flat():
    assert orjson.loads(generate_body([SAMPLE])) == {
        "input_ids": [1, 2, 3],
        "rid": "a",
        "extra_key": "k",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }


def test_several_samples_are_sent_as_lists():
    strided = GenerateSample("b", np.arange(8, dtype=np.int32)[::2], "l")
    body = orjson.loads(generate_body([SAMPLE, strided]))
    assert body["input_ids"] == [[1, 2, 3], [0, 2, 4, 6]]
    assert body["rid"] == ["a", "b"]
    assert body["extra_key"] == ["k", "l"]


def answering(bodies: list[dict[str, Any]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        bodies.append(body)
        meta = {"prompt_tokens": 3, "cached_tokens": 0, "finish_reason": {"type": "length"}}
        rids = [body["rid"]] if isinstance(body["rid"], str) else body["rid"]
        answers = [{"output_ids": [7], "meta_info": meta | {"id": rid}} for rid in rids]
        return web.json_response(answers if isinstance(body["rid"], list) else answers[0])

    return handler


async def test_what_was_prepared_is_sent_if_it_is_what_is_asked_for(serve, monkeypatch):
    bodies: list[dict[str, Any]] = []
    client, _ = await serve({"/generate": answering(bodies)})
    other = GenerateSample("b", np.array([4, 5, 6], np.int32), "l")
    made: list[list[str]] = []

    def counted(samples):
        made.append([sample.rid for sample in samples])
        return generate_body(samples)

    monkeypatch.setattr(sglang, "generate_body", counted)
    client.prepare([SAMPLE, other])
    await client.generate([SAMPLE, other], timeout_seconds=30)
    assert made == [["a", "b"]]
    client.prepare([SAMPLE, other])
    await client.generate([other], timeout_seconds=30)
    await client.generate([other, SAMPLE], timeout_seconds=30)
    assert made == [["a", "b"], ["a", "b"], ["b"], ["b", "a"]]
    assert [body["rid"] for body in bodies] == [["a", "b"], "b", ["b", "a"]]
    assert [body["input_ids"] for body in bodies] == [[[1, 2, 3], [4, 5, 6]], [4, 5, 6], [[4, 5, 6], [1, 2, 3]]]


async def test_an_answer_that_is_not_json_is_refused(serve):
    client, _ = await serve({"/generate": text("<html>")})
    with pytest.raises(RequestRefused, match="not JSON") as caught:
        await client.generate([SAMPLE], timeout_seconds=30)
    assert caught.value.status == 502


async def test_an_answer_cut_off_in_the_middle_is_an_unreachable_worker(serve):
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"output_ids":')
        assert request.transport is not None
        request.transport.close()
        return response

    client, _ = await serve({"/generate": cut})
    with pytest.raises(WorkerUnreachable, match="/generate"):
        await client.generate([SAMPLE], timeout_seconds=30)


async def test_a_server_that_starts_is_not_up_and_is_never_asked_for_its_health(serve):
    client, asked = await serve({"/ping": text("", 503), "/health": text("")})
    assert not await client.is_up()
    assert asked == ["/ping"]


async def test_a_server_without_ping_is_up_if_it_knows_its_model(serve):
    client, asked = await serve({"/model_info": text("{}")})
    assert await client.is_up()
    assert asked == ["/ping", "/model_info"]


async def test_older_servers_tell_their_facts_on_older_pages(serve):
    client, _ = await serve({"/get_server_info": text('{"version": "0.5.12"}'), "/get_model_info": text('{"model_path": "m"}')})
    assert await client.server_facts() == ServerFacts("0.5.12", "m", None)


async def test_a_url_that_nobody_can_ask_is_an_unreachable_worker():
    client = SglangClient("http://127.0.0.1:99999")
    assert not await client.is_up()
    with pytest.raises(WorkerUnreachable, match="99999"):
        await client.generate([SAMPLE], timeout_seconds=30)


@pytest.mark.parametrize(("model", "reason"), [("{}", "names no model_path"), ("[]", "not a JSON object")])
async def test_facts_of_something_else_are_refused(serve, model, reason):
    client, _ = await serve({"/server_info": text("{}"), "/model_info": text(model)})
    with pytest.raises(RequestRefused, match=reason):
        await client.server_facts()


async def test_a_key_goes_with_every_call_and_is_never_told():
    seen: list[str | None] = []

    async def wrong_key(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"error": f"{request.headers['Authorization']} is none of mine"}, status=401)

    app = web.Application()
    app.router.add_route("*", "/{page}", wrong_key)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    client = SglangClient(str(server.make_url("/")), api_key="hunter2")
    try:
        for call in (client.generate([SAMPLE], timeout_seconds=30), client.abort("a"), client.server_facts()):
            with pytest.raises(RequestRefused) as refused:
                await call
            assert "hunter2" not in str(refused.value)
        assert not await client.is_up()
    finally:
        await client.close()
        await server.close()
    assert len(seen) >= 4
    assert set(seen) == {"Bearer hunter2"}
