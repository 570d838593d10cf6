"""The blocking client of a Statetap service, for scripts and the command line: `http`'s, call by call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class SyncStatetapClient:
    """Talks to one service; use it as a context manager. Its methods are those of `http.StatetapClient`."""

    def __init__(self, url: str | None = None, *, api_key: str | None = None, timeout_seconds: float = 60.0) -> None:
        self.url = calls.service_url(url)
        self._timeout_seconds = timeout_seconds
        self._http = httpx.Client(base_url=self.url, mounts=calls.DIRECT, headers=headers(find_api_key(api_key)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def create_dataset(
        self,
        samples: Samples,
        *,
        name: str | None = None,
        model: str | None = None,
        allow_empty_mask: bool = False,
        gzip: bool = False,
    ) -> Dataset:
        """Stream samples to the service: they are never in memory all at once."""
        body = upload(samples, gzip=gzip)
        call = calls.create_dataset(gzipped=body.gzipped, name=name, model=model, allow_empty_mask=allow_empty_mask)
        return self._send(call, body.chunks)

    def create_dataset_from_path(
        self, path: str, *, name: str | None = None, model: str | None = None, allow_empty_mask: bool = False
    ) -> Dataset:
        """Have the service read a file below one of its dataset roots."""
        return self._send(calls.create_dataset_from_path(path, name=name, model=model, allow_empty_mask=allow_empty_mask))

    def datasets(self) -> Iterator[Dataset]:
        return self._items(calls.datasets)

    def dataset(self, dataset_id: str) -> Dataset:
        return self._send(calls.dataset(dataset_id))

    def delete_dataset(self, dataset_id: str) -> None:
        self._send(calls.delete_dataset(dataset_id))

    def submit(self, request: JobRequest, *, idempotency_key: str | None = None) -> Job:
        """Start a job. With a key, the same request may be sent again and starts no second one."""
        return self._send(calls.submit(request, idempotency_key))

    def jobs(self) -> Iterator[Job]:
        """Newest first."""
        return self._items(calls.jobs)

    def job(self, job_id: str) -> Job:
        return self._send(calls.job(job_id))

    def steer(self, job_id: str, verb: Verb) -> Job:
        """Pause, resume or cancel a job, or try its failed samples again."""
        return self._send(calls.steer(job_id, verb))

    def samples(self, job_id: str, *, status: SampleStatusName | None = None) -> Iterator[Sample]:
        return self._items(lambda cursor: calls.samples(job_id, status, cursor))

    def events(
        self, job_id: str, *, after: int = 0, follow: bool = True, patience_seconds: float = PATIENCE_SECONDS
    ) -> Iterator[Event]:
        """A job's events after the one with the id `after`: the log's and, if `follow`, those to come until the job ends."""
        ended = self.job(job_id).state in FINAL_STATES
        position = LogPosition(job_id, after=after, follow=follow, ended=ended)
        patience = Patience(patience_seconds)
        while True:
            following = position.following
            try:
                with self._stream(position) as response:
                    for message in EventSource(response).iter_sse():
                        patience.renew()
                        if (event := position.take(message)) is not None:
                            yield event
                        if following and not position.following:
                            break
            except httpx.TransportError as error:
                patience.spend(calls.unreachable(self.url, error))
                time.sleep(RECONNECT_SECONDS)
                continue
            if not following and not position.following:
                return
            if following and position.following:
                time.sleep(RECONNECT_SECONDS)

    def wait(
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
                job = self.job(job_id)
            except ServiceUnreachable as error:
                patience.spend(error)
            else:
                patience.renew()
                if on_progress is not None:
                    on_progress(job)
                if job.state in FINAL_STATES:
                    return job
            time.sleep(poll_seconds)

    def workers(self) -> list[Worker]:
        return self._send(calls.workers()).items

    def add_worker(self, request: WorkerRequest) -> Worker:
        return self._send(calls.add_worker(request))

    def remove_worker(self, name: str) -> None:
        self._send(calls.remove_worker(name))

    def drain_worker(self, name: str) -> Worker:
        return self._send(calls.drain_worker(name))

    def health(self) -> Health:
        """Whether the service can take work, and if not, why."""
        return self._send(calls.health())

    def _send(self, call: Call[T], body: Iterator[bytes] | None = None) -> T:
        arguments = call.arguments(self._timeout_seconds)
        if body is not None:
            arguments["content"] = body
        try:
            response = self._http.request(**arguments)
        except httpx.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        return calls.settle(call, response)

    def _items(self, call: Callable[[str | None], Call[Page[T]]]) -> Iterator[T]:
        cursor = None
        while True:
            page = self._send(call(cursor))
            yield from page.items
            cursor = page.cursor
            if cursor is None:
                return

    @contextmanager
    def _stream(self, position: LogPosition) -> Iterator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout_seconds, read=SILENCE_SECONDS)
        headers, query = position.headers, dict(position.query)
        with self._http.stream("GET", position.path, params=query, headers=headers, timeout=timeout) as response:
            if not response.is_success:
                response.read()
            calls.raise_for_problem(response)
            yield response
