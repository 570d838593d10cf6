"""The asynchronous client against the real API on a real socket."""

from __future__ import annotations

import gzip
import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from statetap_client import calls, http
from statetap_client.errors import ServiceUnreachable, StatetapError
from statetap_client.http import StatetapClient
from statetap_client.schemas import Capture, Dataset, Job, JobRequest, PluginDumps, WorkerRequest
from statetap_client.sync import SyncStatetapClient

from tests.fakes.api_server import FakeService, serving

SAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
LINES = b'{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n'


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[StatetapClient]:
    async with serving(service) as url, StatetapClient(url) as opened:
        yield opened


@pytest.fixture
async def dataset(client: StatetapClient) -> Dataset:
    return await client.create_dataset(SAMPLES, name="two")


@pytest.fixture
async def job(client: StatetapClient, dataset: Dataset) -> Job:
    return await client.submit(JobRequest(dataset=dataset.id, store="s.zarr"))


@pytest.fixture
def unused_url() -> str:
    return "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RECONNECT_SECONDS", 0.01)


class TestDatasets:
    @pytest.mark.parametrize("compress", [False, True])
    @pytest.mark.parametrize("form", ["mappings", "lines", "path", "string", "gzipped path"])
    async def test_samples_may_come_in_any_form(
        self, client: StatetapClient, service: FakeService, tmp_path: Path, form: str, compress: bool
    ) -> None:
        (tmp_path / "two.ndjson").write_bytes(LINES)
        (tmp_path / "two.ndjson.gz").write_bytes(gzip.compress(LINES))
        samples: Any = {
            "mappings": iter(SAMPLES),
            "lines": iter(LINES.splitlines()),
            "path": tmp_path / "two.ndjson",
            "string": str(tmp_path / "two.ndjson"),
            "gzipped path": tmp_path / "two.ndjson.gz",
        }[form]
        made = await client.create_dataset(samples, name="two", model="org/other", gzip=compress)
        assert (made.name, made.model, made.samples, made.tokens) == ("two", "org/other", 2, 5)
        assert service.datasets.received_gzipped == (compress or form == "gzipped path")

    async def test_a_refusal_in_mid_upload_names_the_line(self, client: StatetapClient) -> None:
        """The service stops reading at the line that is wrong; what it said of it must arrive all the same."""

        def samples() -> Iterator[bytes]:
            yield b'{"input_ids": []}'
            filler = b'{"input_ids": [' + b"1," * 500_000 + b"1]}"
            for _ in range(40):
                yield filler

        with pytest.raises(StatetapError, match="line 1, field 'input_ids'") as caught:
            await client.create_dataset(samples())
        assert (caught.value.status, caught.value.problem.line, caught.value.problem.field) == (400, 1, "input_ids")

    async def test_a_file_that_the_service_reads(self, client: StatetapClient, tmp_path: Path) -> None:
        (tmp_path / "there.jsonl").write_bytes(LINES)
        made = await client.create_dataset_from_path("there.jsonl")
        assert (made.name, made.samples) == ("there", 2)

    async def test_it_is_shown_listed_and_deleted(self, client: StatetapClient, dataset: Dataset) -> None:
        assert await client.dataset(dataset.id) == dataset
        assert [d async for d in client.datasets()] == [dataset]
        await client.delete_dataset(dataset.id)
        with pytest.raises(StatetapError) as caught:
            await client.dataset(dataset.id)
        assert caught.value.status == 404

    async def test_lists_go_on_over_pages(self, client: StatetapClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "PAGE_LIMIT", 2)
        for name in "abcde":
            await client.create_dataset(SAMPLES, name=name)
        assert [d.name async for d in client.datasets()] == list("abcde")


class TestJobs:
    async def test_a_key_starts_one_job(self, client: StatetapClient, dataset: Dataset) -> None:
        request = JobRequest(dataset=dataset.id, store="s", capture=Capture(final="both"))
        first = await client.submit(request, idempotency_key="once")
        again = await client.submit(request, idempotency_key="once")
        assert (first.id, first.final) == (again.id, "both")
        with pytest.raises(StatetapError) as caught:
            await client.submit(request.model_copy(update={"store": "t"}), idempotency_key="once")
        assert caught.value.status == 409

    async def test_steering(self, client: StatetapClient, job: Job) -> None:
        assert (await client.steer(job.id, "pause")).state == "paused"
        assert (await client.steer(job.id, "resume")).state == "running"
        assert (await client.steer(job.id, "cancel")).state == "cancelled"
        with pytest.raises(StatetapError, match="is cancelled"):
            await client.steer(job.id, "retry")

    async def test_samples_by_status(self, client: StatetapClient, service: FakeService, job: Job) -> None:
        await service.jobs.finish(job.id, failed=1)
        assert [s.status async for s in client.samples(job.id)] == ["stored", "failed"]
        assert [s.reason async for s in client.samples(job.id, status="failed")] == ["non-finite states"]

    async def test_ids_are_quoted(self, client: StatetapClient) -> None:
        with pytest.raises(StatetapError) as caught:
            await client.job("../datasets?limit=1")
        assert caught.value.status == 404
        assert "../datasets" in str(caught.value)

    async def test_waiting_tells_of_every_look(self, client: StatetapClient, service: FakeService, job: Job) -> None:
        seen: list[str] = []
        finish = service.jobs.view

        async def finish_at_second_look(job_id: str) -> Any:
            if len(seen) == 1 and service.ledger.job_records[job_id].finished_at is None:
                await service.jobs.finish(job_id)
            return await finish(job_id)

        service.jobs.view = finish_at_second_look
        ended = await client.wait(job.id, on_progress=lambda j: seen.append(j.state), poll_seconds=0)
        assert (seen, ended.state) == (["running", "completed"], "completed")

    async def test_waiting_has_an_end_to_its_patience(self, unused_url: str) -> None:
        async with StatetapClient(unused_url) as client:
            with pytest.raises(ServiceUnreachable):
                await client.wait("j", poll_seconds=0, patience_seconds=0)


class TestEvents:
    async def test_they_end_with_the_job(self, client: StatetapClient, service: FakeService, job: Job) -> None:
        seen = []
        async for event in client.events(job.id):
            seen.append((event.id, event.event))
            if len(seen) == 1:
                await service.jobs.finish(job.id)
        assert seen == [(1, "job.submitted"), (2, "job.completed")]

    async def test_those_of_an_ended_job_are_the_whole_log(self, client: StatetapClient, service: FakeService, job: Job) -> None:
        """The first `job.completed` isn't the end of a job that was tried again."""
        await service.jobs.finish(job.id, failed=1)
        await client.steer(job.id, "retry")
        await service.jobs.finish(job.id)
        expected = ["job.submitted", "job.completed", "job.retried", "job.completed"]
        assert [e.event async for e in client.events(job.id)] == expected
        assert [e.event async for e in client.events(job.id, after=2)] == expected[2:]

    async def test_a_job_tried_again_while_it_is_followed_is_followed_on(
        self, client: StatetapClient, service: FakeService, job: Job
    ) -> None:
        seen = []
        async for event in client.events(job.id):
            seen.append(event.event)
            if event.id == 1:
                await service.jobs.finish(job.id, failed=1)
                await service.jobs.retry(job.id)
            if event.event == "job.retried":
                await service.jobs.finish(job.id)
        assert seen == ["job.submitted", "job.completed", "job.retried", "job.completed"]

    async def test_without_following_the_log_so_far_is_all(self, client: StatetapClient, job: Job) -> None:
        assert [e.event async for e in client.events(job.id, follow=False)] == ["job.submitted"]

    @pytest.mark.usefixtures("impatient")
    async def test_a_restart_of_the_service_loses_nothing_and_repeats_nothing(self, service: FakeService) -> None:
        async with serving(service) as url, StatetapClient(url) as client:
            dataset = await client.create_dataset(SAMPLES)
            job = await client.submit(JobRequest(dataset=dataset.id, store="s"))
            stream = client.events(job.id)
        async with StatetapClient(url) as client:
            port = int(url.rpartition(":")[2])
            async with serving(service, port):
                stream = client.events(job.id)
                assert (await anext(stream)).event == "job.submitted"
            await service.jobs.pause(job.id)
            async with serving(service, port):
                assert (await anext(stream)).event == "job.paused"
                await service.jobs.resume(job.id)
                await service.jobs.finish(job.id)
                assert [e.event async for e in stream] == ["job.resumed", "job.completed"]

    @pytest.mark.usefixtures("impatient")
    async def test_a_service_that_stays_away_ends_them(self, service: FakeService) -> None:
        async with serving(service) as url, StatetapClient(url) as client:
            dataset = await client.create_dataset(SAMPLES)
            job = await client.submit(JobRequest(dataset=dataset.id, store="s"))
        async with StatetapClient(url) as client:
            async with serving(service, int(url.rpartition(":")[2])):
                stream = client.events(job.id, patience_seconds=0)
                await anext(stream)
            with pytest.raises(ServiceUnreachable):
                await anext(stream)

    async def test_an_unknown_job_has_none(self, client: StatetapClient) -> None:
        with pytest.raises(StatetapError, match="absent"):
            await anext(client.events("absent"))


class TestWorkers:
    async def test_a_worker_comes_and_goes(self, client: StatetapClient) -> None:
        request = WorkerRequest(name="gpu-0", url="http://127.0.0.1:30000", dumps=PluginDumps(dir="/dev/shm/statetap"))
        added = await client.add_worker(request)
        assert await client.workers() == [added]
        assert (await client.drain_worker("gpu-0")).state == "draining"
        await client.remove_worker("gpu-0")
        assert await client.workers() == []


class TestService:
    async def test_health_says_why_not(self, client: StatetapClient, service: FakeService) -> None:
        assert (await client.health()).status == "ok"
        service.readiness = (False, "no worker is ready")
        health = await client.health()
        assert (health.status, health.detail) == ("not ready", "no worker is ready")

    async def test_nobody_there(self, unused_url: str) -> None:
        async with StatetapClient(unused_url) as client:
            with pytest.raises(ServiceUnreachable, match="statetap serve") as caught:
                await client.health()
        assert caught.value.url == unused_url

    def test_a_url_must_be_one(self) -> None:
        with pytest.raises(ServiceUnreachable, match="http://"):
            StatetapClient("localhost:8420")

    def test_the_environment_names_the_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STATETAP_URL", "http://elsewhere:1/")
        assert StatetapClient().url == "http://elsewhere:1"
        monkeypatch.delenv("STATETAP_URL")
        assert StatetapClient().url == "http://127.0.0.1:8420"

    async def test_a_proxy_is_not_for_this_machine(
        self, service: FakeService, unused_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", unused_url)
        monkeypatch.setenv("ALL_PROXY", unused_url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with serving(service) as url, StatetapClient(url) as client:
            assert (await client.health()).status == "ok"

    @pytest.mark.parametrize(("status", "title"), [(200, "Unexpected answer"), (502, "Bad Gateway")])
    async def test_something_else_answers(self, status: int, title: str) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text="<html>proxy</html>", status=status)

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with StatetapClient("http://{}:{}".format(*runner.addresses[0])) as client:
            with pytest.raises(StatetapError, match="as Statetap does") as caught:
                await client.job("j")
        await runner.cleanup()
        assert (caught.value.status, caught.value.problem.title) == (status, title)


def test_both_clients_have_the_same_methods_with_the_same_parameters() -> None:
    def parameters(kind: type) -> dict[str, list[inspect.Parameter]]:
        public = {name: method for name, method in vars(kind).items() if callable(method) and not name.startswith("_")}
        return {name: list(inspect.signature(method).parameters.values()) for name, method in public.items()}

    assert parameters(StatetapClient) == parameters(SyncStatetapClient)
