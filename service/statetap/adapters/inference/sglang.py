"""SGLang's native HTTP interface, as far as extraction needs it.

Facts of the wire are read off SGLang 0.5.23 (`srt/entrypoints/http_server.py`, `srt/managers/tokenizer_manager.py`). `/health`
is never asked: it runs a forward pass of its own, whose dump would be one more stray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from yarl import URL

from statetap.adapters.inference.answers import complaint, read_answers, read_context_length
from statetap.adapters.inference.connections import Connections, NoConnection
from statetap.ports import (
    GenerateSample,
    InferenceError,
    Outcome,
    RequestRefused,
    RequestTimedOut,
    ServerFacts,
    WorkerUnreachable,
)

BAD_GATEWAY = 502
MASK = "**********"


class SglangClient:
    """One SGLang server at `url` (scheme, host and port, perhaps a path). Makes its connections on first use; never retries.

    `api_key` is what a server that was started with `--api-key` wants.
    `connect_seconds` bounds the opening of a connection, `passive_seconds` every call except `generate`, whose bound is its own.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, connect_seconds: float = 10.0, passive_seconds: float = 30.0
    ) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._connect_seconds = connect_seconds
        self._passive_seconds = passive_seconds
        self._connections: Connections | None = None
        # Made once: the same few pages are asked for again and again.
        self._targets: dict[str, str] = {}
        self._prepared: tuple[list[str], bytes] = ([], b"")

    def prepare(self, samples: Sequence[GenerateSample]) -> None:
        """Make the body of a request that may be asked for next: told apart by its rids, each of which is one attempt's alone."""
        self._prepared = _rids(samples), generate_body(samples)

    async def generate(self, samples: Sequence[GenerateSample], *, timeout_seconds: float) -> list[Outcome]:
        """Prefill the samples as one request and ask each for one token at temperature 0; outcomes in the samples' order.

        Raises:
            WorkerUnreachable: no connection, or it broke before the whole answer was here.
            RequestTimedOut: no answer within `timeout_seconds`.
            RequestRefused: an HTTP error; 502 for an answer that is not JSON.
        """
        if not samples:
            raise ValueError("a request needs at least one sample")
        rids = _rids(samples)
        prepared, body = self._prepared
        if prepared != rids:
            body = generate_body(samples)
        reply = await self._call("POST", "/generate", timeout_seconds, body)
        return read_answers(self._json("/generate", reply), rids)

    async def abort(self, rid: str) -> None:
        """Ask the worker to drop a request; that it knows none of that id is no error."""
        await self._call("POST", "/abort_request", self._passive_seconds, orjson.dumps({"rid": rid}))

    async def server_facts(self) -> ServerFacts:
        server = await self._ask("/server_info", "/get_server_info")
        model = await self._ask("/model_info", "/get_model_info")
        model_path = model.get("model_path") or server.get("model_path")
        if not isinstance(model_path, str):
            raise RequestRefused(BAD_GATEWAY, f"{self._url}/model_info names no model_path; is this an SGLang server?")
        return ServerFacts(str(server.get("version", "")), model_path, read_context_length(server))

    async def is_up(self) -> bool:
        """Whether `/ping` says 200: a flag check in SGLang, which says 503 while the server starts, ails or shuts down."""
        try:
            await self._ask_any("/ping", "/model_info")
        except InferenceError:
            return False
        return True

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    async def _ask(self, path: str, older_path: str) -> dict[str, Any]:
        facts = self._json(path, await self._ask_any(path, older_path))
        if not isinstance(facts, dict):
            raise RequestRefused(BAD_GATEWAY, f"{self._url}{path} answered {type(facts).__name__}, not a JSON object")
        return facts

    async def _ask_any(self, path: str, other_path: str) -> bytes:
        """GET `path`, or `other_path` where a server has no such page."""
        try:
            return await self._call("GET", path, self._passive_seconds)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
        return await self._call("GET", other_path, self._passive_seconds)

    async def _call(self, method: str, path: str, timeout_seconds: float, body: bytes | None = None) -> bytes:
        url = self._url + path
        try:
            # Only the connect bound is ours besides the caller's: a prefill is silent for as long as it runs.
            reply = await self._connected().ask(method, self._target(path), body, timeout_seconds=timeout_seconds)
        except (NoConnection, ValueError) as error:
            raise WorkerUnreachable(f"{url}: {error}") from error
        except TimeoutError as error:
            raise RequestTimedOut(f"{url}: no answer within {timeout_seconds:g} s") from error
        if reply.status >= 300:
            told = complaint(reply.content) or reply.reason or "no reason given"
            # What a server says of a key that it does not like ends up in logs and answers.
            raise RequestRefused(reply.status, told.replace(self._api_key, MASK) if self._api_key else told)
        return reply.content

    def _json(self, path: str, content: bytes) -> Any:
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise RequestRefused(BAD_GATEWAY, f"{self._url}{path} answered something that is not JSON: {error}") from error

    def _connected(self) -> Connections:
        """ValueError: the URL is none that can be asked."""
        if self._connections is None:
            headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
            self._connections = Connections(URL(self._url), headers, connect_seconds=self._connect_seconds)
        return self._connections

    def _target(self, path: str) -> str:
        if path not in self._targets:
            self._targets[path] = URL(self._url + path).raw_path_qs
        return self._targets[path]


def generate_body(samples: Sequence[GenerateSample]) -> bytes:
    """The JSON body of `/generate`: plain values for one sample, lists of the same length for several."""
    ids = [np.ascontiguousarray(sample.token_ids) for sample in samples]
    rids = _rids(samples)
    keys = [sample.extra_key for sample in samples]
    single = len(samples) == 1
    body = {
        "input_ids": ids[0] if single else ids,
        "rid": rids[0] if single else rids,
        "extra_key": keys[0] if single else keys,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _rids(samples: Sequence[GenerateSample]) -> list[str]:
    return [sample.rid for sample in samples]
