"""States of prompts that run whole, alone and in batches, against Hugging Face. Strangers use the same servers throughout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.captures import captures_of, named_dumps, sweep, take_dumps
from tests.e2e.environment import SMOL, TINY
from tests.e2e.reference import assert_equal_states, prompts
from tests.e2e.server import SglangServer, running
from tests.e2e.traffic import FOREIGN, ForeignTraffic

FLAGS = ("--disable-radix-cache", "--chunked-prefill-size", "-1", "--max-total-tokens", "4096")


@pytest.fixture(scope="module")
def servers(folder: Path, dumps: Path) -> Iterator[dict[str, SglangServer]]:
    made = [
        SglangServer(name=name, folder=folder, dumps=dumps, model=model, flags=FLAGS)
        for name, model in (("tiny", TINY), ("smol", SMOL))
    ]
    with running(*made):
        yield {server.name: server for server in made}


@pytest.fixture(scope="module", params=["tiny", "smol"])
def server(request: pytest.FixtureRequest, servers: dict[str, SglangServer]) -> Iterator[SglangServer]:
    server = servers[request.param]
    with ForeignTraffic(server):
        yield server
    server.check_alive()
    server.kill()


def test_the_beacon_says_what_is_published(server: SglangServer) -> None:
    beacon = server.beacon()
    layers, hidden = (4, 64) if server.tiny else (30, 576)
    assert (beacon.aux_layer_ids, beacon.final, beacon.hidden_size) == (tuple(range(layers)), "both", hidden)
    assert (beacon.dtype, beacon.sglang_version, beacon.tp_size, beacon.dp_size) == ("float32", server.version, 1, 1)
    assert (beacon.radix_cache, beacon.chunked_prefill_size, beacon.model_path) == (False, None, str(server.model))


@pytest.mark.parametrize(
    "lengths",
    [[1], [2], [97], [7, 50, 23, 1, 64], [31, 31, 31, 31]],
    ids=["one row", "two rows", "single", "mixed lengths", "equal lengths"],
)
def test_states_equal_the_reference(server: SglangServer, lengths: list[int]) -> None:
    samples = prompts(server.model, lengths, seed=len(lengths))
    rids = [f"{sum(lengths)}-{index}" for index in range(len(samples))]
    single = len(samples) == 1
    answers = server.generate(samples[0] if single else samples, rids[0] if single else rids)
    for prompt, answer in zip(samples, [answers] if single else answers, strict=True):
        (capture,) = captures_of(prompt, take_dumps(server, answer))
        assert_equal_states(server.model, prompt, capture)


def test_neither_decode_passes_nor_dummy_batches_are_published(server: SglangServer) -> None:
    (prompt,) = prompts(server.model, [12])
    answer = server.generate(prompt, "long-answer", max_new_tokens=16)
    assert answer["meta_info"]["completion_tokens"] == 16
    assert len(named_dumps(answer)) == 1
    (dump,) = take_dumps(server, answer)
    assert (dump.first, dump.last) == (0, 12)
    strays = sweep(server)
    assert any(dump.rid.startswith(FOREIGN) for dump in strays)
    assert all(dump.prefix_len + dump.extend_len <= (dump.prompt_len or 0) for dump in strays)
