"""Two tensor-parallel ranks: the same states, and only one of the ranks publishes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.captures import captures_of, take_dumps
from tests.e2e.environment import SMOL, TINY
from tests.e2e.reference import assert_equal_states, prompts
from tests.e2e.server import SglangServer, running
from tests.e2e.traffic import ForeignTraffic

FLAGS = ("--tp-size", "2", "--disable-radix-cache", "--chunked-prefill-size", "64", "--max-total-tokens", "4096")


@pytest.fixture(scope="module")
def servers(folder: Path, dumps: Path) -> Iterator[dict[str, SglangServer]]:
    made = [
        SglangServer(name=name, folder=folder, dumps=dumps, model=model, flags=FLAGS, cores="0|1")
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


def test_one_rank_alone_has_a_tap(server: SglangServer) -> None:
    assert server.beacon().tp_size == 2
    taps = [path.name for path in (server.dumps / server.name).iterdir()]
    assert taps == [f"{server.beacon().boot_id}-0"]


@pytest.mark.parametrize("lengths", [[40], [129], [7, 80, 23, 1], [31, 31, 31]], ids=["single", "chunked", "mixed", "equal"])
def test_states_equal_the_reference(server: SglangServer, lengths: list[int]) -> None:
    samples = prompts(server.model, lengths, seed=len(lengths))
    rids = [f"{sum(lengths)}-{index}" for index in range(len(samples))]
    for prompt, answer in zip(samples, server.generate(samples, rids), strict=True):
        (capture,) = captures_of(prompt, take_dumps(server, answer))
        assert_equal_states(server.model, prompt, capture)
