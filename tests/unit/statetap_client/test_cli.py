"""The command line against the real API: what it prints, what it exits with."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from statetap.core.spec import Final, Identity
from statetap_client import cli

from tests.fakes.api_server import FakeService, ServedInThread, serving_in_thread

LINES = b'{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n'


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(FakeService(tmp_path)) as server:
        yield server


@pytest.fixture
def run(served: ServedInThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`statetap` with these arguments, in this process, on this service."""
    monkeypatch.setenv("STATETAP_URL", served.url)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["statetap", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out, err = capsys.readouterr()
        return Ran(int(exited.value.code or 0), out, err)

    return run


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pairs.ndjson"
    path.write_bytes(LINES)
    return str(path)


@pytest.fixture
def job(run: Run, file: str) -> str:
    return json.loads(run("submit", file, "--store", "s.zarr", "--no-wait", "--json").out)["id"]


class TestSubmit:
    def test_it_waits_and_exits_well(self, run: Run, served: ServedInThread, file: str) -> None:
        served.service.jobs.finish_at_once = True
        ran = run("submit", file, "--store", "s.zarr")
        assert ran.code == 0
        assert "dataset ds1: 2 samples, 5 tokens" in ran.err
        assert "job1 completed: 2 of 2 stored" in ran.err
        assert "completed" in ran.out

    def test_all_its_options_reach_the_service(self, run: Run, served: ServedInThread, file: str) -> None:
        what = ("--preset", "eagle3", "--layers", "1,14,26", "--final", "both", "--identity", "count")
        where = ("--order", "permutation", "--seed", "3", "--rows-per-shard", "2048", "--rows-per-chunk", "64")
        how = ("--compression", "zstd", "--name", "night run", "--priority", "7", "--on-over-long", "skip", "--ignore-space")
        sent = ("--model", "org/other", "--gzip")
        ran = run("submit", file, "--store", "s.zarr", *what, *where, *how, *sent, "--no-wait")
        assert ran.code == 0
        (asked,) = served.service.jobs.submissions
        assert (asked.preset, asked.aux_layer_ids, asked.final, asked.identity) == (
            "eagle3",
            (1, 14, 26),
            Final.BOTH,
            Identity.COUNT,
        )
        assert (asked.order, asked.seed, asked.rows_per_shard, asked.rows_per_chunk) == ("permutation", 3, 2048, 64)
        assert asked.compression == "zstd"
        assert (asked.name, asked.priority, asked.on_over_long, asked.ignore_space) == ("night run", 7, "skip", True)
        (dataset,) = served.service.ledger.dataset_records.values()
        assert (dataset.name, dataset.model) == ("night run", "org/other")
        assert served.service.datasets.received_gzipped

    def test_a_compressed_file_is_sent_as_it_is(self, run: Run, served: ServedInThread, tmp_path: Path) -> None:
        (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(LINES))
        assert run("submit", str(tmp_path / "pairs.jsonl.gz"), "--store", "s", "--no-wait").code == 0
        (dataset,) = served.service.ledger.dataset_records.values()
        assert (dataset.name, dataset.samples) == ("pairs", 2)

    def test_standard_input(self, run: Run, served: ServedInThread, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))
        assert run("submit", "-", "--store", "s", "--no-wait").code == 0
        (dataset,) = served.service.ledger.dataset_records.values()
        assert dataset.samples == 2

    def test_a_job_with_failed_samples_exits_1(self, run: Run, served: ServedInThread, job: str) -> None:
        served.call(served.service.jobs.finish(job, failed=1))
        ran = run("watch", job, "--json")
        assert ran.code == 1
        assert json.loads(ran.out)["failures"] == {"non-finite states": 1}

    def test_a_refused_dataset_names_the_line(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "bad.ndjson").write_bytes(b'{"input_ids": [1]}\n{"input_ids": []}\n')
        ran = run("submit", str(tmp_path / "bad.ndjson"), "--store", "s")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err == "statetap: line 2, field 'input_ids': an empty sequence\n"

    def test_a_refused_job_leaves_no_dataset_behind(self, run: Run, served: ServedInThread, file: str) -> None:
        ran = run("submit", file, "--store", "full")
        assert ran.code == 1
        assert "10 GB" in ran.err
        assert served.service.ledger.dataset_records == {}

    @pytest.mark.parametrize(
        "arguments",
        [
            ("absent.ndjson", "--store", "s"),
            ("FILE",),
            ("FILE", "--store", "s", "--layers", "one"),
            ("FILE", "--store", "s", "--order", "backwards"),
            ("FILE", "--store", "s", "--rows-per-shard", "0"),
        ],
    )
    def test_wrong_use_exits_2(self, run: Run, file: str, arguments: tuple[str, ...]) -> None:
        assert run("submit", *(file if a == "FILE" else a for a in arguments)).code == 2


class TestJobs:
    def test_a_list_is_tab_separated_when_piped(self, run: Run, job: str) -> None:
        ran = run("jobs")
        assert ran.code == 0
        assert [line.split("\t") for line in ran.out.splitlines()] == [
            ["job", "name", "state", "samples", "time left"],
            [job, "pairs", "running", "0 of 2 stored", "1 min 0 s"],
        ]

    def test_as_json_it_is_one_document(self, run: Run, file: str) -> None:
        for _ in range(3):
            run("submit", file, "--store", "s", "--no-wait")
        assert [j["id"] for j in json.loads(run("jobs", "--json", "--limit", "2").out)] == ["job3", "job2"]

    def test_one_of_them(self, run: Run, served: ServedInThread, job: str) -> None:
        served.call(served.service.jobs.finish(job, failed=1))
        out = run("jobs", job).out
        for told in ("completed", "1 of 2 stored, 1 failed", "non-finite states: 1", "w0: 1 stored", "layers 1, 14, 26"):
            assert told in out
        assert json.loads(run("jobs", job, "--json").out)["id"] == job

    def test_steering(self, run: Run, job: str) -> None:
        assert run("pause", job).out == f"{job} is paused\n"
        assert json.loads(run("resume", job, "--json").out)["state"] == "running"
        assert run("cancel", job).code == 0
        ran = run("retry", job)
        assert (ran.code, ran.out) == (1, "")
        assert "cancelled" in ran.err
        assert run("watch", job).code == 1

    def test_its_events_are_lines(self, run: Run, served: ServedInThread, job: str) -> None:
        served.call(served.service.jobs.finish(job))
        ran = run("watch", job, "--events")
        assert [json.loads(line)["event"] for line in ran.out.splitlines()] == ["job.submitted", "job.completed"]
        assert ran.code == 0

    def test_samples(self, run: Run, served: ServedInThread, job: str) -> None:
        served.call(served.service.jobs.finish(job, failed=1))
        assert run("samples", job).out.splitlines()[1].split("\t") == ["0", "1", "stored", "3", "1", "w0", ""]
        failed = run("samples", job, "--status", "failed", "--json")
        assert [json.loads(line)["reason"] for line in failed.out.splitlines()] == ["non-finite states"]

    def test_an_unknown_job(self, run: Run) -> None:
        ran = run("jobs", "absent")
        assert (ran.code, ran.err) == (1, "statetap: no job 'absent'\n")


class TestWorkers:
    def test_they_come_and_go(self, run: Run) -> None:
        assert run("workers", "add", "gpu-0", "http://127.0.0.1:30000", "--dumps", "/dev/shm/statetap").out == "gpu-0 is ready\n"
        assert run("workers").out.splitlines()[1].startswith("gpu-0\tready\thttp://127.0.0.1:30000\torg/model\t")
        assert run("workers", "drain", "gpu-0").out == "gpu-0 is draining\n"
        assert [w["name"] for w in json.loads(run("workers", "--json").out)] == ["gpu-0"]
        assert run("workers", "remove", "gpu-0").code == 0
        assert json.loads(run("workers", "--json").out) == []

    def test_plain_dumps_are_declared_in_a_file(self, run: Run, served: ServedInThread, tmp_path: Path) -> None:
        declared = {
            "kind": "plain",
            "dir": "/d",
            "aux_layer_ids": [1],
            "final": "none",
            "model_path": "m",
            "model_fingerprint": "f",
        }
        declared |= {"num_layers": 2, "hidden_size": 8, "vocab_size": 9, "dtype": "float32"}
        (tmp_path / "dumps.json").write_text(json.dumps(declared))
        ran = run("workers", "add", "old-0", "http://h:1", "--dumps-config", str(tmp_path / "dumps.json"), "--json")
        assert ran.code == 0
        assert served.service.workers.records["old-0"].dumps["kind"] == "plain"

    @pytest.mark.parametrize(
        "arguments",
        [("gpu-0", "http://h:1"), ("gpu 0", "http://h:1", "--dumps", "/d"), ("gpu-0", "h:1", "--dumps", "/d")],
    )
    def test_wrong_use_exits_2(self, run: Run, arguments: tuple[str, ...]) -> None:
        assert run("workers", "add", *arguments).code == 2


class TestCommandLine:
    def test_nobody_there(self, run: Run) -> None:
        ran = run("jobs", "--url", "http://127.0.0.1:9")
        assert ran.code == 1
        assert "http://127.0.0.1:9" in ran.err
        assert "statetap serve" in ran.err

    def test_it_runs_as_a_module(self) -> None:
        ran = subprocess.run([sys.executable, "-m", "statetap_client", "--version"], capture_output=True, text=True, check=True)
        assert ran.stdout.startswith("statetap ")

    @pytest.mark.parametrize("arguments", [("frobnicate",), ("jobs", "--frobnicate")])
    def test_wrong_use_exits_2(self, run: Run, arguments: tuple[str, ...]) -> None:
        assert run(*arguments).code == 2
