"""The blocking client: the same calls, where a test of the asynchronous one doesn't already speak for both."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from statetap_client import calls, sync
from statetap_client.errors import ServiceUnreachable, StatetapError
from statetap_client.schemas import Event, Job, JobRequest, PluginDumps, WorkerRequest
from statetap_client.sync import SyncStatetapClient

from tests.fakes.api_server import FakeService, ServedInThread, serving_in_thread

SAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(FakeService(tmp_path)) as server:
        yield server


@pytest.fixture
def client(served: ServedInThread) -> Iterator[SyncStatetapClient]:
    with SyncStatetapClient(served.url) as opened:
        yield opened


@pytest.fixture
def job(client: SyncStatetapClient) -> Job:
    dataset = client.create_dataset(SAMPLES, name="two", gzip=True)
    return client.submit(JobRequest(dataset=dataset.id, store="s.zarr"), idempotency_key="once")


def test_the_way_of_a_job(client: SyncStatetapClient, served: ServedInThread, job: Job) -> None:
    assert [j.id for j in client.jobs()] == [job.id]
    assert client.steer(job.id, "pause").state == "paused"
    assert client.steer(job.id, "resume").state == "running"
    served.call(served.service.jobs.finish(job.id, failed=1))
    seen: list[Job] = []
    ended = client.wait(job.id, on_progress=seen.append)
    assert (ended.state, seen) == ("completed", [ended])
    assert [s.status for s in client.samples(job.id)] == ["stored", "failed"]
    client.delete_dataset(job.dataset)
    with pytest.raises(StatetapError, match="no dataset"):
        client.dataset(job.dataset)


def test_datasets_by_path_and_over_pages(client: SyncStatetapClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAGE_LIMIT", 1)
    (tmp_path / "a.jsonl").write_bytes(b'{"input_ids": [1]}')
    client.create_dataset_from_path("a.jsonl")
    client.create_dataset(tmp_path / "a.jsonl", name="b")
    assert [d.name for d in client.datasets()] == ["a", "b"]


def test_events_end_with_the_job(client: SyncStatetapClient, served: ServedInThread, job: Job) -> None:
    seen = []
    for event in client.events(job.id):
        seen.append(event.event)
        if len(seen) == 1:
            served.call(served.service.jobs.finish(job.id))
    assert seen == ["job.submitted", "job.completed"]
    assert [e.event for e in client.events(job.id, after=1)] == ["job.completed"]
    with pytest.raises(StatetapError):
        next(client.events("absent"))


def silent_service(*names: str) -> httpx.MockTransport:
    """A service that has nothing to say for a while after each event of a log, but that it is there, in a comment."""
    log = [Event(id=number, event=name, at=datetime.now(UTC), data={}) for number, name in enumerate(names, 1)]

    def answer(request: httpx.Request) -> httpx.Response:
        newer = [event for event in log if event.id > int(request.headers["Last-Event-ID"])]
        lines = [f"id: {event.id}\nevent: {event.event}\ndata: {event.model_dump_json()}\n\n: ping\n\n" for event in newer]
        return httpx.Response(200, text="".join(lines), headers={"Content-Type": "text/event-stream"})

    return httpx.MockTransport(answer)


def test_signs_of_life_are_no_events(client: SyncStatetapClient, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncStatetapClient, "job", lambda _self, _job: job)
    client._http = httpx.Client(base_url=client.url, transport=silent_service("job.submitted", "job.started", "job.completed"))
    assert [event.event for event in client.events(job.id)] == ["job.submitted", "job.started", "job.completed"]


def test_workers_and_health(client: SyncStatetapClient) -> None:
    added = client.add_worker(WorkerRequest(name="gpu-0", url="http://127.0.0.1:30000", dumps=PluginDumps(dir="/d")))
    assert client.workers() == [added]
    assert client.drain_worker("gpu-0").state == "draining"
    client.remove_worker("gpu-0")
    assert client.health().status == "ok"


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "RECONNECT_SECONDS", 0.01)
    with serving_in_thread(FakeService(tmp_path)) as served, SyncStatetapClient(served.url) as client:
        dataset = client.create_dataset(SAMPLES)
        job = client.submit(JobRequest(dataset=dataset.id, store="s"))
        stream = client.events(job.id, patience_seconds=0)
        assert next(stream).event == "job.submitted"
    with pytest.raises(ServiceUnreachable):
        next(stream)
    with SyncStatetapClient(served.url) as client, pytest.raises(ServiceUnreachable):
        client.wait(job.id, poll_seconds=0, patience_seconds=0)
