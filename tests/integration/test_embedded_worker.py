"""The embedded worker as a process: what it says, publishes and dies of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from statetap.embedded.cli import worker as command
from statetap.embedded.model import load
from statetap.embedded.options import WorkerOptions
from statetap_sglang.beacon import Beacon
from statetap_sglang.plain import PlainLayout, open_plain_dump
from statetap_sglang.reader import open_dump
from transformers import DynamicCache
from typer.testing import CliRunner

START_SECONDS = 120
PROMPT = [(i * 37 + 11) % 1000 + 3 for i in range(90)]


@dataclass
class Process:
    """A started worker; `lines` are the log lines it wrote up to `worker.ready`."""

    popen: subprocess.Popen[str]
    lines: list[dict[str, Any]]

    @property
    def ready(self) -> dict[str, Any]:
        return self.lines[-1]

    def generate(self, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ready['port']}/generate", data, timeout=60) as response:
            return json.load(response)


@contextlib.contextmanager
def started(model: Path, dumps: Path, *options: str, module: Sequence[str] = ("-m", "statetap.embedded")) -> Iterator[Process]:
    arguments = [sys.executable, *module, "--model-path", str(model), "--dump-dir", str(dumps), "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            lines = []
            assert popen.stdout is not None
            for line in popen.stdout:
                lines.append(json.loads(line))
                if lines[-1]["event"] == "worker.ready":
                    break
            assert lines, "the worker ended before it said a word"
            yield Process(popen, lines)
        finally:
            popen.kill()


def test_it_serves_publishes_and_ends_on_sigterm(model: Path, tmp_path: Path) -> None:
    options = ("--layers", "0,3", "--final", "both", "--chunked-prefill-size", "64", "--name", "w")
    with started(model, tmp_path / "dumps", *options) as worker:
        assert [line["event"] for line in worker.lines] == ["worker.starting", "worker.ready"]
        directory = Path(worker.ready["dumps"])
        beacon = Beacon.read(directory)
        assert (beacon.aux_layer_ids, beacon.final, beacon.pid) == ((0, 3), "both", worker.popen.pid)
        answer = worker.generate({"input_ids": PROMPT, "rid": "r", "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)
        worker.popen.send_signal(signal.SIGTERM)
        assert worker.popen.wait(30) == 0

    # The same model in this process gives the same bits, chunk by chunk.
    local = load(WorkerOptions(model_path=str(model), dump_dir=tmp_path, aux_layer_ids=(0, 3), final="both"))
    cache = DynamicCache()
    assert local.fingerprint == beacon.model_fingerprint
    names = [f"req_{n}.safetensors" for n in (1, 2)]  # req_0 is the warm-up's
    for name, start in zip(names, (0, 64), strict=True):
        expected = local.run(PROMPT[start : start + 64], cache)
        with open_dump(directory / name) as dump:
            assert (dump.metadata.rid, dump.metadata.prefix_len, dump.metadata.forward_pass) == ("r", start, 9 + start // 64)
            for tensor, values in expected.states.items():
                assert bytes(dump.tensors[tensor].data) == values.contiguous().numpy().tobytes()
    assert answer["output_ids"] == [expected.next_token]


def test_plain_dumps_show_every_pass_and_a_token_outside_the_vocabulary_kills_it(model: Path, tmp_path: Path) -> None:
    options = ("--plain", "pt", "--plain-published-by", "DONE", "--publish-decode")
    with started(model, tmp_path / "dumps", *options, module=("-c", _AS_A_COMMAND)) as worker:
        worker.generate({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}})
        layout = PlainLayout.default(aux_layers=2, final="post_norm", kind="pt", published_by="DONE")
        directory = tmp_path / "dumps" / "worker"
        counts = []
        for number in range(len(list(directory.iterdir()))):
            with open_plain_dump(directory / f"req_{number}", layout) as dump:
                counts.append(dump.rows)
        warm_up = [3] + 7 * [1]
        assert counts == [*warm_up, len(PROMPT), 1, 1]

        with pytest.raises((urllib.error.URLError, ConnectionError)):
            worker.generate({"input_ids": [5, 1024]})
        assert worker.popen.wait(30) == 128 + signal.SIGQUIT
        assert worker.popen.stdout is not None
        [died] = [json.loads(line) for line in worker.popen.stdout]
        assert (died["event"], died["level"]) == ("worker.died", "critical")
        assert died["error"].startswith("IndexError")


# How the command line of `statetap-client` finds and runs it.
_AS_A_COMMAND = """
from importlib.metadata import entry_points
import typer
typer.run(entry_points(group="statetap.commands")["worker"].load())
"""


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, statetap.commands.worker; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=START_SECONDS).returncode == 0


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--final", "prenorm"], 2, "post_norm, pre_norm"),
        (["--layers", "1,x"], 2, "layer ids"),
        (["--layers", "none", "--final", "none"], 2, "nothing to capture"),
        (["--chunked-prefill-size", "0"], 2, "at least 1 token"),
        (["--name", "a/b"], 2, "single path component"),
        (["--model-path", "/nowhere"], 1, "no model at /nowhere"),
        (["--layers", "4"], 1, "within 0..3"),
        (["--context-length", "1000"], 1, "context of 1000 tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(
    model: Path, tmp_path: Path, options: list[str], code: int, reason: str
) -> None:
    import typer

    app = typer.Typer()
    app.command()(command)
    arguments = ["--model-path", str(model), "--dump-dir", str(tmp_path / "dumps"), "--port", "0", *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == code
    assert reason in " ".join(result.output.replace("│", " ").split())
