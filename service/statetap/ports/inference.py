"""One SGLang server, as the runtime asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class InferenceError(Exception):
    """A request that brought no answer. The message says what happened."""


class WorkerUnreachable(InferenceError):
    """No connection, or it broke: the worker is down, starting, or went away in mid-request."""


class RequestTimedOut(InferenceError):
    """No answer in time; the request may still be running on the worker."""


class RequestRefused(InferenceError):
    """The worker answered with an error. 4xx is the request's fault and permanent, 5xx is the worker's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class GenerateSample:
    """One sample of a request. `extra_key` keeps it apart from every cached prefix."""

    rid: str
    token_ids: NDArray[np.int32]
    extra_key: str


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """What the worker said of one sample. `next_token` is its answer at temperature 0, -1 if it gave none.

    `dumps` names what it published for the request, each `<boot_id>-<dp_rank>/req_<N>`; None if it does not tell.
    """

    rid: str
    prompt_tokens: int
    cached_tokens: int
    next_token: int
    dumps: frozenset[str] | None = None


Outcome = GenerateAnswer | RequestRefused
"""What came of one sample of a request that was answered."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """From `/server_info` and `/model_info`. `context_length` in tokens, None if the server does not tell."""

    version: str
    model_path: str
    context_length: int | None


class InferenceClient(Protocol):
    """One worker's HTTP interface. It never retries: the runtime decides."""

    def prepare(self, samples: Sequence[GenerateSample]) -> None:
        """Make ready what `generate` would send for exactly these samples. Nothing is sent; only the latest is kept."""
        ...

    async def generate(self, samples: Sequence[GenerateSample], *, timeout_seconds: float) -> list[Outcome]:
        """Prefill the samples as one request: what came of each, in their order. It raises what befell the request as a whole."""
        ...

    async def abort(self, rid: str) -> None: ...

    async def server_facts(self) -> ServerFacts: ...

    async def is_up(self) -> bool:
        """Whether the server answers, asked without making it run a forward pass."""
        ...

    async def close(self) -> None: ...
