"""What an examination asks of an SGLang server beyond `InferenceClient`: its settings, its load, answers of several tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from statetap.adapters.inference.answers import read_answers
from statetap.adapters.inference.sglang import SglangClient, generate_body
from statetap.ports import GenerateAnswer, GenerateSample, RequestRefused


class DoctorClient(SglangClient):
    """Implements `ExaminedServer`."""

    async def settings(self) -> Mapping[str, Any]:
        return await self._ask("/server_info", "/get_server_info")

    async def model(self) -> Mapping[str, Any]:
        return await self._ask("/model_info", "/get_model_info")

    async def requests_running(self) -> int | None:
        """See the port. `/v1/loads` has one entry a data-parallel rank (SGLang 0.5.23, `srt/entrypoints/v1_loads.py`)."""
        try:
            loads = self._json("/v1/loads", await self._call("GET", "/v1/loads", self._passive_seconds))
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads["loads"])
        except (RequestRefused, KeyError, TypeError):
            return None

    async def ask(self, samples: Sequence[GenerateSample], *, new_tokens: int, timeout_seconds: float) -> list[GenerateAnswer]:
        body = orjson.loads(generate_body(samples))
        body["sampling_params"] |= {"max_new_tokens": new_tokens, "ignore_eos": True}
        reply = await self._call("POST", "/generate", timeout_seconds, orjson.dumps(body))
        answers: list[GenerateAnswer] = []
        for outcome in read_answers(self._json("/generate", reply), [sample.rid for sample in samples]):
            if isinstance(outcome, RequestRefused):
                raise outcome
            answers.append(outcome)
        return answers
