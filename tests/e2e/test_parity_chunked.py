"""Chunked prefill, mixed with decode, over a prefix cache and with retraction, against Hugging Face; strangers throughout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from statetap_client.reader import StoreReader

from tests.e2e.captures import Published, captures_of, take_dumps
from tests.e2e.environment import CURRENT, PREVIOUS, SMOL, TINY
from tests.e2e.gateway import forgetful_gateway
from tests.e2e.reference import assert_equal_states, prompts
from tests.e2e.server import SglangServer, running
from tests.e2e.service import service_over
from tests.e2e.traffic import ForeignTraffic

CHUNK = 64
FLAGS = ("--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk", "--max-total-tokens", "2048")
# SGLang's own switch for tests: at every third pass a request is taken back, as when there is no room for keys and values.
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
RETRACTION_TURNS = 6
MIXED = re.compile(r"Prefill batch.*#running-req: [1-9]")


@pytest.fixture(scope="module")
def servers(folder: Path, dumps: Path) -> Iterator[dict[str, SglangServer]]:
    kinds = (("tiny", TINY, CURRENT), ("smol", SMOL, CURRENT), ("previous", TINY, PREVIOUS))
    made = [
        SglangServer(name=name, folder=folder, dumps=dumps, model=model, flags=FLAGS, version=version, variables=RETRACTION)
        for name, model, version in kinds
    ]
    with running(*made):
        yield {server.name: server for server in made}


@pytest.fixture(scope="module", params=["tiny", "smol", "previous"])
def server(request: pytest.FixtureRequest, servers: dict[str, SglangServer]) -> Iterator[SglangServer]:
    server = servers[request.param]
    with ForeignTraffic(server):
        yield server
    server.check_alive()
    server.kill()


def assert_captured(model: Path, prompt: list[int], dumps: list[Published]) -> None:
    """It came whole and equal to the reference: once at least, for what is taken back runs again."""
    captures = captures_of(prompt, dumps)
    assert captures
    for capture in captures:
        assert_equal_states(model, prompt, capture)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_around_the_chunk_size(server: SglangServer, chunks: int, more: int) -> None:
    (prompt,) = prompts(server.model, [chunks * CHUNK + more], seed=100 * chunks + more)
    assert_captured(server.model, prompt, take_dumps(server, server.generate(prompt, f"{chunks}-{more}")))


def test_a_batch_that_chunks_cut_anywhere(server: SglangServer) -> None:
    samples = prompts(server.model, [30, 25, 40, 90, 1], seed=11)
    answers = server.generate(samples, [f"batch-{index}" for index in range(len(samples))])
    dumps = [take_dumps(server, answer) for answer in answers]
    assert max(map(len, dumps)) > 1, "no prompt was cut"
    for prompt, parts in zip(samples, dumps, strict=True):
        assert_captured(server.model, prompt, parts)


def test_a_prefix_that_the_cache_holds_is_not_published(server: SglangServer) -> None:
    """What was asked before comes as fewer rows, which make no capture; under a cache key of its own it comes whole.

    A request that is taken back runs again, so that all this may come more than once.
    """
    (prompt,) = prompts(server.model, [100], seed=12)
    longer = prompt + prompts(server.model, [30], seed=13)[0]
    assert_captured(server.model, prompt, take_dumps(server, server.generate(prompt, "cached-0", extra_key="one")))
    again = take_dumps(server, server.generate(prompt, "cached-1", extra_key="one"))
    shared = take_dumps(server, server.generate(longer, "cached-2", extra_key="one"))
    assert {(dump.first, dump.last) for dump in again} == {(99, 100)}
    assert len({dump.metadata.retraction_count for dump in again}) == len(again)
    assert min(dump.first for dump in shared) >= 99
    assert captures_of(prompt, again) == captures_of(longer, shared) == []
    assert_captured(server.model, longer, take_dumps(server, server.generate(longer, "cached-3", extra_key="another")))


def test_prefill_runs_mixed_with_decode(server: SglangServer) -> None:
    samples = prompts(server.model, [20, 150, 150, 150], seed=14)
    before = len(MIXED.findall(server.log))
    answers = server.generate(samples, [f"mixed-{index}" for index in range(4)], max_new_tokens=24)
    dumps = [take_dumps(server, answer) for answer in answers]
    assert len(MIXED.findall(server.log)) > before, "no prefill ran beside a decode"
    for prompt, parts in zip(samples, dumps, strict=True):
        assert_captured(server.model, prompt, parts)


def test_a_request_that_is_taken_back_and_runs_again(server: SglangServer) -> None:
    """SGLang takes back who has been answered least, so a stranger wherever there is one: asked until it was one of ours."""
    samples = prompts(server.model, [70, 90, 20], seed=15)
    for turn in range(RETRACTION_TURNS):
        rids = [f"retracted-{turn}-{index}" for index in range(len(samples))]
        answers = server.generate(samples, rids, max_new_tokens=24)
        for prompt, answer in zip(samples, answers, strict=True):
            assert_captured(server.model, prompt, take_dumps(server, answer))
        if any(answer["meta_info"]["num_retractions"] for answer in answers):
            return
    pytest.fail(f"in {RETRACTION_TURNS} turns nothing was taken back")


def test_the_service_refuses_what_the_cache_cut_and_asks_again(server: SglangServer, tmp_path: Path) -> None:
    """Behind a gateway that forgets the first requests' cache keys: repeated and shared prefixes, stored whole in the end."""
    one, other = prompts(server.model, [90, 40], seed=16)
    samples = [one, one, one[:60], one + other, other, other + one[:30], other, one + other]
    dataset = [{"id": f"s{index}", "input_ids": ids} for index, ids in enumerate(samples)]
    # One sample may be what the gateway forgets each time; and so many refusals put the worker in quarantine, for half a minute
    # otherwise.
    runtime = {"attempts_per_sample": len(samples) + 1, "quarantine_seconds": 1.0}
    with (
        forgetful_gateway(server, forgets=len(samples)) as gateway,
        service_over(tmp_path, {server.name: server}, ports={server.name: gateway.port}, **runtime) as (made, client),
    ):
        made.wait_for_workers(client, server.name)
        job = made.run_job(client, dataset, "whole.zarr")
        refused = [line["reason"].split(":")[0] for line in made.log("capture.refused")]
    assert (job.state, job.failures, job.progress.samples.stored) == ("completed", {}, len(samples))
    assert len(refused) >= len(samples) // 2
    assert set(refused) == {"prefix_cached"}
    reader = StoreReader(job.store)
    for index, prompt in enumerate(samples):
        sample = reader.sample_as_numpy(index)
        assert sample.input_ids.tolist() == prompt
        states = {name: getattr(sample, name) for name in reader.hidden_arrays}
        assert_equal_states(server.model, prompt, states)
