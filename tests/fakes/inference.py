"""`FakeInferenceClient`: a worker that answers at once, or as a test scripts it. It passes `SglangClient`'s contract suite."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from statetap.ports import (
    GenerateAnswer,
    GenerateSample,
    Outcome,
    RequestRefused,
    RequestTimedOut,
    ServerFacts,
    WorkerUnreachable,
)


@dataclass(frozen=True)
class Answer:
    """Answer every sample, with these figures."""

    cached_tokens: int = 0
    next_token: int = 7


@dataclass(frozen=True)
class AnswerSome:
    """Answer the samples at these places, and refuse each of the others for itself."""

    answered: tuple[int, ...]
    status: int = 503


@dataclass(frozen=True)
class Refuse:
    status: int
    message: str = "refused by the script"


@dataclass(frozen=True)
class Unreachable:
    reason: str = "connection refused"


@dataclass(frozen=True)
class Hang:
    """Say nothing until the time-out, `expire()`, or `wake()` (then answer)."""


Scripted = Answer | AnswerSome | Refuse | Unreachable | Hang
FACTS = ServerFacts("0.5.23", "/models/tiny", 4096)
OnRequest = Callable[[Sequence[GenerateSample]], Awaitable[None]]


class FakeInferenceClient:
    """One worker, in memory.

    `script` is consumed one outcome a request; when it is empty, `default` holds. `on_request` is awaited before a request's
    outcome: there a test publishes the dumps. `names` has the dumps that the answer to a rid names, if any, and `cached`
    its cached tokens, if they are not the outcome's. `requests`, `timeouts`, `prepared` and `aborted` record what was
    asked. A second request while one is in flight is an AssertionError: that is invariant 1.
    """

    def __init__(
        self,
        *script: Scripted,
        default: Scripted = Answer(),
        on_request: OnRequest | None = None,
        facts: ServerFacts = FACTS,
        names: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.script = deque(script)
        self.default = default
        self.on_request = on_request
        self.facts = facts
        self.names = {} if names is None else names
        self.cached: dict[str, int] = {}
        self.up = True
        self.closed = False
        self.in_flight: tuple[GenerateSample, ...] = ()
        self.requests: list[tuple[GenerateSample, ...]] = []
        self.prepared: list[tuple[GenerateSample, ...]] = []
        self.timeouts: list[float] = []
        self.aborted: list[str] = []
        self.hanging = asyncio.Event()
        self._verdict: asyncio.Future[bool] | None = None

    def prepare(self, samples: Sequence[GenerateSample]) -> None:
        self.prepared.append(tuple(samples))

    async def generate(self, samples: Sequence[GenerateSample], *, timeout_seconds: float) -> list[Outcome]:
        assert not self.closed, "generate on a closed client"
        assert not self.in_flight, f"{samples[0].rid} was sent while {self.in_flight[0].rid} is in flight"
        if not samples:
            raise ValueError("a request needs at least one sample")
        self.in_flight = tuple(samples)
        self.requests.append(self.in_flight)
        self.timeouts.append(timeout_seconds)
        try:
            if not self.up:
                raise WorkerUnreachable("connection refused")
            if self.on_request is not None:
                await self.on_request(samples)
            return await self._outcome(self.script.popleft() if self.script else self.default, samples, timeout_seconds)
        finally:
            self.in_flight = ()

    async def abort(self, rid: str) -> None:
        self._require_up()
        self.aborted.append(rid)

    async def server_facts(self) -> ServerFacts:
        self._require_up()
        return self.facts

    async def is_up(self) -> bool:
        return self.up

    async def close(self) -> None:
        self.closed = True

    def expire(self) -> None:
        """Time the hanging request out now, whatever its time-out."""
        self._decide(answers=False)

    def wake(self) -> None:
        """Let the hanging request be answered."""
        self._decide(answers=True)

    def _decide(self, *, answers: bool) -> None:
        assert self._verdict is not None, "no request hangs; await `hanging.wait()` first"
        if not self._verdict.done():
            self._verdict.set_result(answers)

    def _require_up(self) -> None:
        if not self.up:
            raise WorkerUnreachable("connection refused")

    async def _outcome(self, outcome: Scripted, samples: Sequence[GenerateSample], timeout_seconds: float) -> list[Outcome]:
        match outcome:
            case Refuse(status, message):
                raise RequestRefused(status, message)
            case Unreachable(reason):
                raise WorkerUnreachable(reason)
            case Hang():
                await self._hang(timeout_seconds)
                return self._answers(Answer(), samples)
            case Answer():
                return self._answers(outcome, samples)
            case AnswerSome(answered, status):
                answers = self._answers(Answer(), samples)
                return [
                    answer if place in answered else RequestRefused(status, f"{answer.rid} was aborted")
                    for place, answer in enumerate(answers)
                ]

    def _answers(self, outcome: Answer, samples: Sequence[GenerateSample]) -> list[Outcome]:
        return [
            GenerateAnswer(
                sample.rid,
                len(sample.token_ids),
                self.cached.get(sample.rid, outcome.cached_tokens),
                outcome.next_token,
                frozenset(self.names[sample.rid]) if sample.rid in self.names else None,
            )
            for sample in samples
        ]

    async def _hang(self, timeout_seconds: float) -> None:
        self._verdict = asyncio.get_running_loop().create_future()
        self.hanging.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                answers = await self._verdict
        except TimeoutError:
            answers = False
        finally:
            self._verdict = None
            self.hanging.clear()
        if not answers:
            raise RequestTimedOut(f"no answer within {timeout_seconds:g} s")
