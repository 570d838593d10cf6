"""`make bench-plugin`: what the plugin costs a real SGLang server, and what fetching the states as JSON would cost instead.

Two servers with the same model and flags are alive, one with the plugin and one without; an idle one sleeps. Only one of them is
asked at a time: a burst of prompts one after another, so that publishing a prompt's states overlaps with the next prefill, then
a pause until all is published, so that nothing is left over for the other's turn. The turns alternate, and which one begins
changes from round to round. Figures are ratios within one round; their medians are shown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from statetap_sglang.checksum import differing_rows
from statetap_sglang.reader import open_dump

from tests.e2e.captures import named_dumps
from tests.e2e.environment import SMOL
from tests.e2e.server import SglangServer, running

FLAGS = ("--disable-radix-cache", "--chunked-prefill-size", "-1", "--max-total-tokens", "4096")
FLAGS += ("--enable-return-hidden-states",)
# The layers that the flag for JSON gives by default are the plugin's default too: EAGLE-3's.
LAYERS = (1, 14, 26)
AUX_LAYERS = ("--return-aux-hidden-state-layer-ids", *map(str, LAYERS))
VOCABULARY = 49152
WANTED_THROUGHPUT = 0.97
PUBLISH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: what it compares, its median ratio and spread, and how much is wanted."""

    what: str
    ratio: float
    lowest: float
    highest: float
    wanted: float
    detail: str

    @property
    def verdict(self) -> str:
        return "ok" if self.ratio >= self.wanted else "short"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--burst", type=int, default=3, help="prompts of one turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="statetap-bench-"))
    dumps = Path(tempfile.mkdtemp(prefix="statetap-bench-", dir="/dev/shm"))
    try:
        tapped = SglangServer(name="tapped", folder=folder, dumps=dumps, model=SMOL, flags=(*FLAGS, *AUX_LAYERS), plugin=PLUGIN)
        plain = SglangServer(name="plain", folder=folder, dumps=dumps, model=SMOL, flags=(*FLAGS, *AUX_LAYERS), plugin={})
        with running(tapped, plain):
            rows = [*throughput(tapped, plain, options), *against_json(tapped, plain, options)]
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(dumps)
    if options.json:
        print(json.dumps([asdict(row) | {"verdict": row.verdict} for row in rows], indent=2))
    else:
        show(rows, options)


PLUGIN = {"LAYERS": ",".join(map(str, LAYERS)), "FINAL": "post_norm"}


def throughput(tapped: SglangServer, plain: SglangServer, options: argparse.Namespace) -> list[Row]:
    """Prefill tokens a second with the plugin over those without."""
    seconds: dict[str, list[float]] = {tapped.name: [], plain.name: []}
    for turn in range(-1, options.rounds):
        for server in (tapped, plain) if turn % 2 else (plain, tapped):
            began = time.perf_counter()
            answers = [ask(server, options.tokens) for _ in range(options.burst)]
            took = time.perf_counter() - began
            if server is tapped:
                for answer in answers:
                    take(server, answer)
            if turn >= 0:  # the first turn of each warms up
                seconds[server.name].append(took)
    ratios = [without / with_it for with_it, without in zip(seconds[tapped.name], seconds[plain.name], strict=True)]
    tokens = options.tokens * options.burst
    speeds = [tokens / statistics.median(seconds[server.name]) for server in (tapped, plain)]
    detail = f"{speeds[0]:,.0f} against {speeds[1]:,.0f} tokens/s"
    return [row("prefill tokens/s, with the plugin over without", ratios, WANTED_THROUGHPUT, detail)]


def against_json(tapped: SglangServer, plain: SglangServer, options: argparse.Namespace) -> list[Row]:
    """From the request to states in memory: through a dump, checked; and out of the response's JSON, as one array."""
    seconds: list[tuple[float, float]] = []
    nbytes = (0, 0)
    for turn in range(options.rounds):
        ways: list[Callable[[], int]] = [
            lambda: through_dump(tapped, options.tokens),
            lambda: through_json(plain, options.tokens),
        ]
        took, moved = [0.0, 0.0], [0, 0]
        for way in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            moved[way] = ways[way]()
            took[way] = time.perf_counter() - began
        seconds.append((took[0], took[1]))
        nbytes = (moved[0], moved[1])
    dump, by_json = (statistics.median(column) for column in zip(*seconds, strict=True))
    ratios = [by_json / dump for dump, by_json in seconds]
    sizes = nbytes[1] / nbytes[0]
    return [
        row("time to states in memory, JSON over a dump", ratios, 1.0, f"{by_json:.2f} against {dump:.2f} s"),
        row(
            "bytes, JSON over a dump",
            [sizes],
            1.0,
            f"{nbytes[1] / 1e6:.1f} against {nbytes[0] / 1e6:.1f} MB, the dump with the final state",
        ),
    ]


def through_dump(server: SglangServer, tokens: int) -> int:
    return take(server, ask(server, tokens))


def through_json(server: SglangServer, tokens: int) -> int:
    """Bytes of a response that carries the states; decoded into one float32 array."""
    answer = post(server, tokens, return_hidden_states=True)
    states = np.array(answer.json()["meta_info"]["hidden_states"][0], np.float32)
    assert states.shape == (tokens, len(LAYERS) * 576), states.shape
    return len(answer.content)


def ask(server: SglangServer, tokens: int) -> dict[str, object]:
    answer: dict[str, object] = post(server, tokens).json()
    return answer


_random = np.random.default_rng(0)


def post(server: SglangServer, tokens: int, **more: object) -> httpx.Response:
    body = {
        "input_ids": _random.integers(3, VOCABULARY, tokens).tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        **more,
    }
    answer = server.http.post(f"{server.url}/generate", json=body)
    answer.raise_for_status()
    return answer


def take(server: SglangServer, answer: dict[str, object]) -> int:
    """Wait for the one dump that a response names, check it, and release it; its bytes."""
    (name,) = named_dumps(answer)
    file = server.dumps / server.name / f"{name}.safetensors"
    deadline = time.monotonic() + PUBLISH_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{file} was not published within {PUBLISH_SECONDS:g} s; the end of the log:\n{server.log[-2000:]}")
        time.sleep(0.001)
    with open_dump(file) as dump:
        if differing_rows(dump.tensors):
            raise SystemExit(f"{file} holds other bytes than its checksums say")
        nbytes = dump.nbytes
    file.unlink()
    return nbytes


def row(what: str, ratios: list[float], wanted: float, detail: str) -> Row:
    return Row(what, statistics.median(ratios), min(ratios), max(ratios), wanted, detail)


def show(rows: list[Row], options: argparse.Namespace) -> None:
    title = f"SmolLM2-135M, float32, prompts of {options.tokens:,} tokens, medians of {options.rounds} rounds"
    table = Table(title=title, title_justify="left")
    for column in ("what", "ratio", "lowest", "highest", "wanted", "", "figures"):
        table.add_column(column, justify="left" if column in ("what", "", "figures") else "right")
    for each in rows:
        figures = (f"{each.ratio:.3f}", f"{each.lowest:.3f}", f"{each.highest:.3f}", f">= {each.wanted:g}")
        table.add_row(each.what, *figures, each.verdict, each.detail)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
