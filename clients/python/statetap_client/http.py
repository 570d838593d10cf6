"""The asynchronous client of a Statetap service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import httpx
from httpx_sse import EventSource

from statetap_client import calls
from statetap_client.api_key import find_api_key, headers
from statetap_client.calls import FINAL_STATES, Call, SampleStatusName, Verb
from statetap_client.errors import ServiceUnreachable
from statetap_client.following import (
    PATIENCE_SECONDS,
    POLL_SECONDS,
    RECONNECT_SECONDS,
    SILENCE_SECONDS,
    LogPosition,
    Patience,
)
from statetap_client.schemas import Dataset, Event, Health, Job, JobRequest, Page, Sample, Worker, WorkerRequest
from statetap_client.uploads import Samples, upload

T = TypeVar("T")


class StatetapClient:
    """Talks to one service; use it as an async context manager. `url` None: STATETAP_URL, else this machine.
    `api_key` None: STATETAP_API_KEY, else the file that STATETAP_API_KEY_FILE names, else no key.

    Every call may raise StatetapError (the service answered with a problem) or ServiceUnreachable. No call is sent twice:
    `events` and `wait`, which only read, put up with a service that restarts.
    """

    def __init__(self, url: str | None = None, *, api_key: str | None = None, timeout_seconds: float = 60.0) -> None:
        self.url = calls.service_url(url)
        self._timeout_seconds = timeout_seconds
        self._http = httpx.AsyncClient(base_url=self.url, mounts=calls.DIRECT, headers=headers(find_api_key(api_key)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def create_dataset(
        self,
        samples: Samples,
        *,
        name: str | None = None,
        model: str | None = None,
        allow_empty_mask: bool = False,
        gzip: bool = False,
    ) -> Dataset:
        """Stream samples to the service: they are never in memory all at once, and read in the event loop's thread."""
        body = upload(samples, gzip=gzip)
        call = calls.create_dataset(gzipped=body.gzipped, name=name, model=model, allow_empty_mask=allow_empty_mask)
        return await self._send(call, _asynchronous(body.chunks))

    async def create_dataset_from_path(
        self, path: str, *, name: str | None = None, model: str | None = None, allow_empty_mask: bool = False
    ) -> Dataset:
        """Have the service read a file below one of its dataset roots."""
        return await self._send(calls.create_dataset_from_path(path, name=name, model=model, allow_empty_mask=allow_empty_mask))

    def datasets(self) -> AsyncIterator[Dataset]:
        return self._items(calls.datasets)

    async def dataset(self, dataset_id: str) -> Dataset:
        return await self._send(calls.dataset(dataset_id))

    async def delete_dataset(self, dataset_id: str) -> None:
        await self._send(calls.delete_dataset(dataset_id))

    async def submit(self, request: JobRequest, *, idempotency_key: str | None = None) -> Job:
        """Start a job. With a key, the same request may be sent again and starts no second one."""
        return await self._send(calls.submit(request, idempotency_key))

    def jobs(self) -> AsyncIterator[Job]:
        """Newest first."""
        return self._items(calls.jobs)

    async def job(self, job_id: str) -> Job:
        return await self._send(calls.job(job_id))

    async def steer(self, job_id: str, verb: Verb) -> Job:
        """Pause, resume or cancel a job, or try its failed samples again."""
        return await self._send(calls.steer(job_id, verb))

    def samples(self, job_id: str, *, status: SampleStatusName | None = None) -> AsyncIterator[Sample]:
        return self._items(lambda cursor: calls.samples(job_id, status, cursor))

    async def events(
        self, job_id: str, *, after: int = 0, follow: bool = True, patience_seconds: float = PATIENCE_SECONDS
    ) -> AsyncIterator[Event]:
        """A job's events after the one with the id `after`: the log's and, if `follow`, those to come until the job ends."""
        ended = (await self.job(job_id)).state in FINAL_STATES
        position = LogPosition(job_id, after=after, follow=follow, ended=ended)
        patience = Patience(patience_seconds)
        while True:
            following = position.following
            try:
                async with self._stream(position) as response:
                    async for message in EventSource(response).aiter_sse():
                        patience.renew()
                        if (event := position.take(message)) is not None:
                            yield event
                        if following and not position.following:
                            break
            except httpx.TransportError as error:
                patience.spend(calls.unreachable(self.url, error))
                await asyncio.sleep(RECONNECT_SECONDS)
                continue
            if not following and not position.following:
                return
            if following and position.following:
                await asyncio.sleep(RECONNECT_SECONDS)

    async def wait(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Job], None] | None = None,
        poll_seconds: float = POLL_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> Job:
        """Return the job once it has ended; `on_progress` gets it at every look."""
        patience = Patience(patience_seconds)
        while True:
            try:
                job = await self.job(job_id)
            except ServiceUnreachable as error:
                patience.spend(error)
            else:
                patience.renew()
                if on_progress is not None:
                    on_progress(job)
                if job.state in FINAL_STATES:
                    return job
            await asyncio.sleep(poll_seconds)

    async def workers(self) -> list[Worker]:
        return (await self._send(calls.workers())).items

    async def add_worker(self, request: WorkerRequest) -> Worker:
        return await self._send(calls.add_worker(request))

    async def remove_worker(self, name: str) -> None:
        await self._send(calls.remove_worker(name))

    async def drain_worker(self, name: str) -> Worker:
        return await self._send(calls.drain_worker(name))

    async def health(self) -> Health:
        """Whether the service can take work, and if not, why."""
        return await self._send(calls.health())

    async def _send(self, call: Call[T], body: AsyncIterator[bytes] | None = None) -> T:
        arguments = call.arguments(self._timeout_seconds)
        if body is not None:
            arguments["content"] = body
        try:
            response = await self._http.request(**arguments)
        except httpx.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        return calls.settle(call, response)

    async def _items(self, call: Callable[[str | None], Call[Page[T]]]) -> AsyncIterator[T]:
        cursor = None
        while True:
            page = await self._send(call(cursor))
            for item in page.items:
                yield item
            cursor = page.cursor
            if cursor is None:
                return

    @asynccontextmanager
    async def _stream(self, position: LogPosition) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout_seconds, read=SILENCE_SECONDS)
        headers, query = position.headers, dict(position.query)
        async with self._http.stream("GET", position.path, params=query, headers=headers, timeout=timeout) as response:
            if not response.is_success:
                await response.aread()
            calls.raise_for_problem(response)
            yield response


async def _asynchronous(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
