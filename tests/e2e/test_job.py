"""The main job over two real servers, one of them killed and started again half-way: 200 conversations, each once, all right."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import torch
from statetap_client.reader import StoreReader
from statetap_client.sync import SyncStatetapClient
from statetap_client.verify import verify_against_model, verify_digests
from statetap_client.verify_tokens import verify_tokens

from tests.e2e.environment import SMOL
from tests.e2e.server import SglangServer, running
from tests.e2e.service import service_over
from tests.e2e.traffic import ForeignTraffic
from tests.fakes.cluster import until

CONVERSATIONS = 200
LAYERS = [1, 14, 26]
UNIT = {"rows_per_shard": 1024}
# Strangers that ask without end would take half of a server, and twice the time: the parity tests have those.
STRANGERS_PAUSE_SECONDS = 1.0


def conversations() -> list[dict[str, object]]:
    """The first exchange of the demo's conversations, the shortest of them, in the demo's order: Hugging Face runs each again."""
    source = resources.files("statetap.commands") / "demo_data" / "conversations.ndjson"
    found = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    for conversation in found:
        form, speaker = ("messages", "role") if "messages" in conversation else ("conversations", "from")
        speakers = [turn[speaker] for turn in conversation[form]]
        answer = min(speakers.index(name) for name in ("assistant", "gpt") if name in speakers)
        conversation[form] = conversation[form][: answer + 1]
    longest = sorted(len(json.dumps(conversation)) for conversation in found)[CONVERSATIONS - 1]
    return [conversation for conversation in found if len(json.dumps(conversation)) <= longest][:CONVERSATIONS]


@pytest.fixture
def servers(folder: Path, dumps: Path) -> Iterator[dict[str, SglangServer]]:
    """One that runs prompts whole, one with all that cuts them into pieces; the first with SGLang's flag for layers."""
    plugin = {"FINAL": "both"}
    whole = ("--disable-radix-cache", "--chunked-prefill-size", "-1", "--max-total-tokens", "4096")
    pieces = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--max-total-tokens", "4096")
    made = [
        SglangServer(
            name=name, folder=folder, dumps=dumps, model=SMOL, flags=flags, plugin=plugin, cores=core, aux_flag=name == "whole"
        )
        for name, flags, core in (("whole", whole, "0"), ("pieces", pieces, "1"))
    ]
    with running(*made):
        yield {server.name: server for server in made}


def stored(client: SyncStatetapClient, job: str) -> int:
    return client.job(job).progress.samples.stored


def stored_by(client: SyncStatetapClient, job: str, worker: str) -> int:
    return client.job(job).workers.get(worker, {}).get("stored", 0)


def test_a_server_is_killed_in_mid_job(servers: dict[str, SglangServer], folder: Path) -> None:
    samples = conversations()
    assert len(samples) == CONVERSATIONS
    mortal = servers["pieces"]
    with service_over(folder, servers) as (made, client), ForeignTraffic(servers["whole"], pause_seconds=STRANGERS_PAUSE_SECONDS):
        made.wait_for_workers(client, *servers)
        job = made.submit(client, samples, "conversations.zarr", **UNIT)
        until("both have stored something", lambda: all(stored_by(client, job.id, name) for name in servers))
        before = mortal.tap().name
        mortal.kill()
        until("its loss seen", lambda: mortal.name not in made.ready_workers(client))
        so_far = stored(client, job.id)
        until("the other one goes on alone", lambda: stored(client, job.id) > so_far)
        # Held up only so that the one that comes back finds work left.
        client.steer(job.id, "pause")
        mortal.start()
        mortal.wait_ready()
        made.wait_for_workers(client, *servers)
        assert mortal.tap().name != before
        by_mortal = stored_by(client, job.id, mortal.name)
        assert stored(client, job.id) < CONVERSATIONS
        client.steer(job.id, "resume")
        ended = client.wait(job.id, poll_seconds=0.2)
        events = list(client.events(job.id, follow=False))
        assert {line["worker"] for line in made.log("worker.unreachable")} == {mortal.name}
    assert (ended.state, ended.failures, ended.progress.samples.stored) == ("completed", {}, CONVERSATIONS)
    assert (ended.aux_layer_ids, ended.final, ended.dtype) == (LAYERS, "both", "float32")
    assert ended.workers[mortal.name]["stored"] > by_mortal, "the server that came back was not used"
    assert sum(tally["stored"] for tally in ended.workers.values()) == CONVERSATIONS
    committed = [event.data["unit"] for event in events if event.event == "unit.committed"]
    assert sorted(committed) == list(range(ended.progress.units_total))
    for server in servers.values():
        server.kill()
    assert_equal_to_reference(ended.store)


def assert_equal_to_reference(location: str) -> None:
    """Every sample is there once, its tokens as submitted, its states those of Hugging Face."""
    store = StoreReader(location)
    assert store.stored.tolist() == list(range(CONVERSATIONS))
    assert len(set(store.ids)) == CONVERSATIONS
    ranges = sorted(store.row_range(index) for index in range(CONVERSATIONS))
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(ranges))
    assert verify_tokens(store).unconfirmed == []
    assert verify_digests(store).failures == []
    torch.set_num_threads(os.cpu_count() or 1)  # the servers are gone
    report = verify_against_model(store, SMOL)
    assert (report.checked, report.failures) == (CONVERSATIONS, [])
    assert max(report.max_error.values()) <= 1e-5
