"""SGLang's HTTP interface, as far as it matters for requests and dumps (`entrypoints/http_server.py`, 0.5.23)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from statetap.embedded.model import TappedModel
from statetap.embedded.options import WorkerOptions
from statetap.embedded.outlets import embedded_version
from statetap.embedded.requests import BadRequest, SampleRequest, parse_generate
from statetap.embedded.scheduler import SampleAnswer, Scheduler

# A batch of long prompts as JSON: aiohttp's own limit of 1 MiB would not take a single one of 128K tokens.
_MAX_BODY_BYTES = 256 << 20


class WorkerApi:
    """The routes of one worker. `ready` turns true after the warm-up; until then the health routes say 503."""

    def __init__(self, model: TappedModel, scheduler: Scheduler, options: WorkerOptions) -> None:
        self.ready = False
        self._model = model
        self._scheduler = scheduler
        self._options = options

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort_request)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self.health)
        for path in ("/ping", "/ready"):
            app.router.add_get(path, self.passive_health)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self.model_info)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/flush_cache", self.flush_cache)
        app.router.add_post("/flush_cache", self.flush_cache)
        return app

    async def warm_up(self) -> None:
        """The request that SGLang sends itself at its start: 1 extend pass, 7 decode passes, a random rid."""
        text = "The capital city of France is"
        tokenizer = self._model.tokenizer
        token_ids = [10, 11, 12] if tokenizer is None else tokenizer(text)["input_ids"]
        # It must not end early, or the counters after it would depend on the model.
        request = SampleRequest(rid=uuid.uuid4().hex, token_ids=tuple(token_ids), max_new_tokens=8, ignore_eos=True)
        await self._run([request])
        self.ready = True

    async def generate(self, request: web.Request) -> web.Response:
        try:
            samples, batched = parse_generate(
                await _json_body(request), context_length=self._model.context_length, tokenize=self._tokenize()
            )
            answers = await self._run(samples)
        except BadRequest as error:
            return _refusal(error)
        results = [self._result(answer) for answer in answers]
        return _json(results if batched else results[0])

    async def abort_request(self, request: web.Request) -> web.Response:
        try:
            body = await _json_body(request)
        except BadRequest as error:
            return _refusal(error)
        rid = body.get("rid") if isinstance(body, dict) else None
        if not isinstance(rid, str):
            return _refusal(BadRequest("abort_request needs the rid of a request, a string."))
        self._scheduler.abort(rid)
        return web.Response()

    async def flush_cache(self, _request: web.Request) -> web.Response:
        self._scheduler.flush_cache()
        return web.Response(text="Cache flushed.\n")

    async def health(self, _request: web.Request) -> web.Response:
        """Runs a forward pass of one token, unless passes are running anyway."""
        if not self.ready:
            return web.Response(status=503)
        if self._scheduler.load() == (0, 0):
            try:
                await self._run([SampleRequest(rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", token_ids=(0,), max_new_tokens=1)])
            except BadRequest:
                return web.Response(status=503)
        return web.Response()

    async def passive_health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def server_info(self, _request: web.Request) -> web.Response:
        options, model = self._options, self._model
        return _json(
            {
                "model_path": options.model_path,
                "served_model_name": options.model_path,
                "tokenizer_path": options.model_path,
                "skip_tokenizer_init": model.tokenizer is None,
                "host": options.host,
                "port": options.port,
                "dtype": model.dtype,
                "device": options.device,
                "context_length": model.context_length,
                "disable_radix_cache": options.prefix_cache_tokens is None,
                "chunked_prefill_size": options.chunked_prefill_size or -1,
                "disable_overlap_schedule": True,
                "enable_mixed_chunk": False,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "version": embedded_version(),
                "status": "ready" if self.ready else "starting",
            }
        )

    async def model_info(self, _request: web.Request) -> web.Response:
        return _json(
            {
                "model_path": self._options.model_path,
                "served_model_name": self._options.model_path,
                "tokenizer_path": self._options.model_path,
                "is_generation": True,
            }
        )

    async def loads(self, _request: web.Request) -> web.Response:
        running, waiting = self._scheduler.load()
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "num_total_reqs": running + waiting}
        return _json({"version": embedded_version(), "dp_rank_count": 1, "loads": [load]})

    async def _run(self, samples: Sequence[SampleRequest]) -> list[SampleAnswer]:
        futures = [asyncio.wrap_future(f) for f in self._scheduler.submit(samples)]
        try:
            return await asyncio.gather(*futures)
        except asyncio.CancelledError:
            # The client is gone, and so is whoever would want the rest.
            for sample in samples:
                self._scheduler.abort(sample.rid)
            raise

    def _tokenize(self) -> Any:
        tokenizer = self._model.tokenizer
        return None if tokenizer is None else lambda text: tokenizer(text)["input_ids"]

    def _result(self, answer: SampleAnswer) -> dict[str, Any]:
        text = (
            {}
            if self._model.tokenizer is None
            else {"text": self._model.tokenizer.decode(answer.output_ids, skip_special_tokens=True)}
        )
        # As SGLang returns what a plugin sets as `customized_info`: one value for each output token.
        named = {} if answer.dumps is None else {"statetap_dumps": answer.dumps}
        return text | {
            "output_ids": answer.output_ids,
            "meta_info": {
                "id": answer.rid,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
                "completion_tokens": len(answer.output_ids),
                "num_retractions": 0,
                "e2e_latency": answer.latency_seconds,
                **named,
            },
        }


async def _json_body(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The request body is not JSON: {error}") from error


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _refusal(error: BadRequest) -> web.Response:
    return web.Response(status=400, body=orjson.dumps({"error": {"message": str(error)}}), content_type="application/json")
