"""`statetap doctor` on real workers: sound ones, and each way of setting one up wrongly."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from statetap_client.cli import app
from statetap_sglang.beacon import Beacon
from statetap_sglang.publisher import DumpPublisher
from typer.testing import CliRunner

from tests.fakes.cluster import Cluster, cluster, plain_declaration, small_model, until
from tests.fakes.dumps import make_beacon, publish
from tests.fakes.models import save_model, small_llama

TIMEOUT = 20


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`left` and `right` go together (in chunks and not); each of the others is wrong in its way."""
    models = tmp_path_factory.mktemp("models")
    model, other = small_model(models / "llama"), save_model(small_llama(1), models / "other")
    with cluster(tmp_path_factory.mktemp("doctor"), model) as made:
        made.start_worker("left", "--layers", "0,3", "--chunked-prefill-size", "64")
        made.start_worker("right", "--layers", "0,3", "--chunked-prefill-size", "-1")
        made.start_worker("odd", "--layers", "1,2", "--final", "post_norm", "--radix-cache", "--publish-decode")
        # Declared as left's weights, and of the same shapes, but it has others.
        (tap,) = (made.dumps / "left").iterdir()
        lie = {"aux_layer_ids": [0, 3], "model_fingerprint": Beacon.read(tap).model_fingerprint, "chunked_prefill_size": 64}
        declared = plain_declaration(made.dumps, "plain", other, **lie)
        flags = ("--layers", "0,3", "--plain", "safetensors", "--publish-decode", "--chunked-prefill-size", "64")
        made.start_worker("plain", *flags, "--model", str(other), plain=declared)
        yield made


@dataclass
class Examined:
    exit_code: int
    report: dict[str, Any]

    def of(self, check: str, *, worker: str | None = None) -> list[dict[str, str]]:
        """The findings of one check, on one worker or across all."""
        findings = self.report["across"] if worker is None else self._findings(worker)
        return [finding for finding in findings if finding["check"] == check]

    def bad(self, worker: str) -> set[tuple[str, str]]:
        return {(f["check"], f["severity"]) for f in self._findings(worker) if f["severity"] in ("warning", "error")}

    def _findings(self, worker: str) -> list[dict[str, str]]:
        (found,) = (one["findings"] for one in self.report["workers"] if one["worker"] == worker)
        return found


def doctor(workers: Cluster, *arguments: str, timeout: float = TIMEOUT) -> Examined:
    """Run the command, with no service but the cluster's own."""
    config = workers.folder / "statetap.toml"
    config.write_text(workers._settings(), encoding="utf-8")
    url = workers.url or "http://127.0.0.1:9"
    options = ["--config", str(config), "--url", url, "--timeout", str(timeout), "--json"]
    result = CliRunner().invoke(app, ["doctor", *arguments, *options])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert report["ok"] is (result.exit_code == 0)
    return Examined(result.exit_code, report)


def url_of(workers: Cluster, name: str) -> str:
    return f"http://127.0.0.1:{workers.workers[name].port}"


def test_two_sound_workers_agree(workers: Cluster) -> None:
    before = workers.leftover_dumps()
    found = doctor(workers, "left", "right")
    assert workers.leftover_dumps() == before
    assert found.exit_code == 0
    assert found.bad("left") == found.bad("right") == set()
    assert "these token ids and all rows" in found.of("round_trip", worker="left")[0]["seen"]
    assert "in 2 chunks against one pass" in found.of("chunked", worker="left")[0]["seen"]
    assert "never split" in found.of("chunked", worker="right")[0]["seen"]
    (agreement,) = found.of("agreement")
    assert agreement["severity"] == "ok"
    assert "layer 0" in agreement["seen"]


def test_a_prefix_cache_and_decode_rows_are_found(workers: Cluster) -> None:
    before = workers.leftover_dumps()
    found = doctor(workers, "odd")
    assert workers.leftover_dumps() == before
    assert found.exit_code == 0
    assert found.bad("odd") == {("prefix_cache", "warning"), ("decode_rows", "warning")}
    # The cache is there, and a key of its own keeps each request out of it.
    assert found.of("same_prompt_twice", worker="odd")[0]["severity"] == "ok"


def test_other_layers_and_another_final_state_are_found(workers: Cluster) -> None:
    found = doctor(workers, "left", "odd")
    assert found.exit_code == 1
    errors = [finding["seen"] for finding in found.of("agreement") if finding["severity"] == "error"]
    assert len(errors) == 2
    assert "layers: odd says [1, 2], left says [0, 3]" in errors[0]
    assert "final state: odd says post_norm, left says both" in errors[1]


def test_another_model_is_found_by_its_states_though_it_is_declared_the_same(workers: Cluster) -> None:
    found = doctor(workers, "left", "plain")
    assert found.exit_code == 1
    assert {severity for _, severity in found.bad("left") | found.bad("plain")} <= {"warning"}
    (agreement,) = found.of("agreement")
    assert agreement["severity"] == "error"
    assert "plain and left, the same prompt: relative error layer 0 1." in agreement["seen"]


def test_plain_dumps_are_examined_by_count(workers: Cluster) -> None:
    before = workers.leftover_dumps()
    found = doctor(workers, "plain")
    assert workers.leftover_dumps() == before
    assert found.exit_code == 0
    assert found.bad("plain") == {("decode_rows", "warning")}
    assert "a prompt of 96 tokens came in 2 dumps, as declared" in found.of("chunked", worker="plain")[0]["seen"]


def test_plain_dumps_that_are_declared_wrongly_are_found(workers: Cluster, tmp_path: Path) -> None:
    declared = workers.workers["plain"].plain
    assert declared is not None
    file = tmp_path / "dumps.json"
    file.write_text(json.dumps(declared | {"aux_layer_ids": [0], "hidden_size": 32}))
    found = doctor(workers, f"plain={url_of(workers, 'plain')}", "--dumps-config", str(file), timeout=2)
    assert found.exit_code == 1
    assert ("round_trip", "error") in found.bad("plain")


def test_a_dump_root_that_is_not_the_server_s_is_found(workers: Cluster, tmp_path: Path) -> None:
    (tmp_path / "somebody").mkdir()
    found = doctor(workers, f"left={url_of(workers, 'left')}", "--dumps", str(tmp_path))
    assert found.exit_code == 1
    assert found.bad("left") == {("dump_directory", "error")}
    assert "beside it there are somebody" in found.of("dump_directory", worker="left")[0]["seen"]
    assert not (tmp_path / "left").exists()


def test_a_directory_that_another_server_publishes_in_is_found_by_the_round_trip(workers: Cluster) -> None:
    """Every beacon and every setting is in order: only a prompt can tell."""
    found = doctor(workers, f"right={url_of(workers, 'odd')}", "--dumps", str(workers.dumps), timeout=2)
    assert found.exit_code == 1
    (finding,) = found.of("round_trip", worker="right")
    assert finding["severity"] == "error"
    assert "nothing appeared in the dump directory" in finding["seen"]
    assert "same server" in finding["fix"]


def test_a_dead_port_and_a_server_that_says_nothing_are_found_in_time(workers: Cluster, unused_tcp_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        names = (f"left=http://127.0.0.1:{unused_tcp_port}", f"right=http://127.0.0.1:{port}")
        found = doctor(workers, *names, "--dumps", str(workers.dumps), timeout=1)
    assert found.exit_code == 1
    assert {check for check, _ in found.bad("left") | found.bad("right")} == {"reachable"}
    assert "no answer within 1 s" in found.of("reachable", worker="right")[0]["seen"]
    # What can be seen without the server is still told.
    assert found.of("layers", worker="left")


def test_dumps_of_an_open_unit_outlive_an_examination(workers: Cluster) -> None:
    """A service that was killed comes back for them."""
    with_tap = DumpPublisher(workers.dumps, "left", make_beacon(boot_id="dead"))
    with_tap.announce()
    kept = publish(with_tap, "st-job-0-0-1-1", boot_id="dead")
    with_tap.close()
    assert doctor(workers, "left").exit_code == 0
    assert kept.exists()
    kept.unlink()


def test_a_worker_of_a_running_service_is_left_alone(workers: Cluster) -> None:
    with workers.start_service() as client:
        workers.wait_for_workers(client, "left")
        asked = client.workers()[0].requests
        found = doctor(workers, "left")
        assert found.exit_code == 0
        assert found.bad("left") == {("in_use", "warning")}
        said = "\n".join(finding["seen"] for finding in found.of("in_use", worker="left"))
        assert "a running service has it as ready" in said
        assert "it was sent no prompts" in said
        assert not found.of("round_trip", worker="left")

        client.remove_worker("left")
        found = doctor(workers, "left")
        assert (found.exit_code, found.bad("left")) == (0, set())
        assert found.of("round_trip", worker="left")[0]["severity"] == "ok"
        assert asked == 0
        until("the service had forgotten left", lambda: "left" not in workers.ready_workers(client))


@pytest.mark.parametrize("arguments", [["nobody"], ["http://127.0.0.1:1"], ["--no-such-flag"]])
def test_a_command_that_is_used_wrongly_exits_with_2(tmp_path: Path, arguments: list[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", *arguments, "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
