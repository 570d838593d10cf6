"""The plugin's hooks over a stub of SGLang when something goes wrong: captures are lost with a reason, the server never is."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from statetap_sglang.background import PublishPass
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.refusal import Refusal
from statetap_sglang.tap import tap_is_alive

from tests.fakes.served_plugin import Serve, request
from tests.fakes.sglang_stub import StubModel, StubServer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mm_inputs": ["image", None]}, "multimodal"),
        ({"lora_ids": ["adapter", None]}, "LoRA"),
    ],
)
def test_requests_whose_states_are_not_their_tokens_are_lost_alone(serve: Serve, changes: dict[str, Any], reason: str) -> None:
    served = serve()
    odd, plain = request(5), request(6)
    served.run([(odd, 0, 5), (plain, 0, 6)], **changes)
    assert reason in served.errors()[odd.rid]
    assert served.errors().keys() == {odd.rid}
    served.demand(plain, [(0, 6)])


def test_requests_that_give_embeddings_are_lost(serve: Serve) -> None:
    served = serve()
    one = request(5)
    served.run([(one, 0, 5)], input_embeds=torch.zeros(5, 8))
    assert "embeddings" in served.errors()[one.rid]


def test_a_request_larger_than_the_ring_is_lost_with_figures(serve: Serve) -> None:
    served = serve(RING_BYTES="4K", LAYERS="all")
    large, small = request(100), request(4)
    served.run([(large, 0, 100), (small, 0, 4)])
    assert "the ring has 4096; raise STATETAP_PLUGIN_RING_BYTES" in served.errors()[large.rid]
    served.demand(small, [(0, 4)])


def test_a_full_ring_loses_captures_and_does_not_wait(serve: Serve) -> None:
    served = serve(RING_BYTES="6K", LAYERS="all")
    gate = threading.Event()
    served.plugin.open.background.publish(PublishPass(SimpleNamespace(wait=gate.wait), lambda: None, ()))
    requests = [request(10) for _ in range(4)]
    for one in requests:
        served.server.run([(one, 0, 10)])
    gate.set()
    served.plugin.open.background.drain()
    lost = served.errors()
    assert set(lost.values()) == {
        "the ring is full: the server runs faster than dumps are published; raise STATETAP_PLUGIN_RING_BYTES"
    }
    assert 0 < len(lost) < 4
    for one in requests:
        if one.rid not in lost:
            served.demand(one, [(0, 10)])
    late = request(10)
    served.run([(late, 0, 10)])
    served.demand(late, [(0, 10)])


def test_a_spent_budget_is_a_reason(serve: Serve) -> None:
    served = serve(BUDGET_BYTES="40K")
    requests = [request(10) for _ in range(3)]
    for one in requests:
        served.run([(one, 0, 10)])
    assert "over the tap's budget" in served.errors()[requests[-1].rid]
    served.demand(requests[0], [(0, 10)])


def test_a_forward_pass_that_fails_is_the_servers_own_affair(serve: Serve) -> None:
    served = serve()
    one, two = request(10), request(10)
    served.server.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        served.run([(one, 0, 10)])
    served.server.fails = False
    served.run([(two, 0, 10)])
    assert served.errors() == {one.rid: "the server's forward pass failed"}
    served.demand(two, [(0, 10)])


def raises(*_args: object, **_kwargs: object) -> Any:
    raise RuntimeError("planted")


STEPS = {
    "the batch is read": "statetap_sglang.sglang_plugin.extend_pass",
    "the scheduler's batch is noted": "statetap_sglang.sglang_plugin._obstacle",
    "a number is reserved": "statetap_sglang.state_tap.stem",
    "a dump is named": "statetap_sglang.names.DumpNames.add",
    "room is reserved": "statetap_sglang.snapshot.SnapshotRing.reserve",
    "states are checked": "statetap_sglang.state_tap.check_state",
    "layers are split": "statetap_sglang.state_tap.split_aux",
    "rows are sampled": "statetap_sglang.state_tap._sampled_rows",
    "rows are compared": "statetap_sglang.state_tap.check_same_rows",
    "checksums are taken": "statetap_sglang.snapshot.source_row_checksums",
    "the pass is completed": "statetap_sglang.state_tap.StateTap._check_complete",
    "the norm is run": "statetap_sglang.state_tap.StateTap._norm_check",
    "the norm is compared": "statetap_sglang.state_tap.check_norm",
    "snapshots are sent": "statetap_sglang.snapshot.SnapshotRing.send",
    "a dump is described": "statetap_sglang.state_tap.replace",
    "views are made": "statetap_sglang.state_tap.host_views",
    "a dump is published": "statetap_sglang.publisher.DumpPublisher.publish",
    "a dump is encoded": "statetap_sglang.header.encode",
    "a dump is written": "statetap_sglang.publisher.rename_noreplace",
}


@pytest.mark.parametrize("step", STEPS)
def test_any_step_that_fails_loses_its_captures_and_never_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    served = serve(LAYERS="all", FINAL="both")
    lost, after = [request(10), request(12)], request(10)
    with monkeypatch.context() as planted:
        planted.setattr(STEPS[step], raises)
        if step == "a dump is written":  # the record of the loss is written by the same function
            planted.setattr(
                STEPS[step], lambda source, target: raises() if target.suffix == ".safetensors" else source.rename(target)
            )
        assert served.run([(one, 0, len(one.origin_input_ids)) for one in lost]) is not None
    errors = served.errors()
    assert errors.keys() == {one.rid for one in lost}
    assert all("planted" in reason for reason in errors.values())
    assert served.dumps() == []
    served.run([(after, 0, 10)])
    served.demand(after, [(0, 10)])


@pytest.mark.parametrize(
    "step",
    [
        "statetap_sglang.state_tap.StateTap.begin",
        "statetap_sglang.state_tap.StateTap.take_pre_norm",
        "statetap_sglang.state_tap.StateTap.take_states",
        "statetap_sglang.state_tap.StateTap.finish",
    ],
)
def test_a_hook_that_fails_loses_its_captures_and_never_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    served = serve(LAYERS="all", FINAL="both")
    lost, after = [request(10), request(12)], request(10)
    with monkeypatch.context() as planted:
        planted.setattr(step, raises)
        assert served.run([(one, 0, len(one.origin_input_ids)) for one in lost]) is not None
    errors = served.errors()
    assert errors.keys() == {one.rid for one in lost}
    assert all("planted" in reason or "could not begin" in reason for reason in errors.values())
    served.run([(after, 0, 10)])
    served.demand(after, [(0, 10)])


def test_arguments_that_cannot_be_read_never_fail_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    with monkeypatch.context() as planted:
        planted.setattr("statetap_sglang.sglang_plugin._argument", raises)
        assert served.run([(request(5), 0, 5)]) is not None
    assert served.errors() == {"unknown": "the pass could not begin: RuntimeError: planted"}


def test_a_response_that_cannot_be_written_to_costs_the_names_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setattr(StubServer, "_logits", lambda *_: SimpleNamespace(customized_info="theirs"))
    one = request(5)
    assert served.run([(one, 0, 5)]).customized_info == "theirs"
    served.demand(one, [(0, 5)])


def test_a_request_that_the_scheduler_does_not_know_is_lost(serve: Serve) -> None:
    served = serve()
    one = request(10)
    served.run([(one, 0, 10)], rids=["another"])
    assert "could not begin" in served.errors()["another"]


def test_a_state_before_the_norm_that_did_not_come_by_is_missed(serve: Serve) -> None:
    served = serve(FINAL="pre_norm")
    one, two = request(10), request(10)
    served.run([(one, 0, 10)])
    served.model.model.norm._forward_hooks.clear()  # as when the body is replayed from a CUDA graph
    served.run([(two, 0, 10)])
    served.demand(one, [(0, 10)])
    assert "did not come by in this pass" in served.errors()[two.rid]


def test_a_norm_that_is_not_the_final_one_is_noticed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(FINAL="pre_norm")
    monkeypatch.setattr(served.plugin.open.tap, "_norm", lambda x: 2 * served.model.model.norm.forward(x))
    one = request(10)
    served.run([(one, 0, 10)])
    assert "is not the post-norm state of the same pass" in served.errors()[one.rid]


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        ({"pp_size": 2}, {}, "pipeline parallelism"),
        ({"speculative_algorithm": "EAGLE3"}, {}, "speculative decoding"),
        ({"return_aux_hidden_state_layer_ids": [2, 4, 5]}, {}, "leave that flag out"),
        ({}, {"LAYERS": "9"}, "layer 9 was asked for"),
        ({}, {"LAYERSS": "1"}, "the nearest one is STATETAP_PLUGIN_LAYERS"),
        ({}, {"FINAL": "post"}, "must be one of"),
        ({}, {"BUDGET_BYTES": "900T"}, "above the"),
    ],
)
def test_a_refusal_stands_where_the_beacon_would(
    serve: Serve, arguments: dict[str, Any], variables: dict[str, str], reason: str
) -> None:
    served = serve(arguments=arguments, **variables)
    assert reason in Refusal.read(served.tap).reason
    assert Refusal.read(served.tap).sglang_version == "0.5.23"
    assert not (served.tap / "tap.json").exists()
    assert tap_is_alive(served.tap)
    assert served.run([(request(5), 0, 5)]).customized_info is None


def test_a_model_whose_setter_differs_is_refused(serve: Serve) -> None:
    served = serve(StubModel(shift=0))
    assert "does not capture layers [1, 2]" in Refusal.read(served.tap).reason


def test_a_model_without_a_norm_that_is_known_is_refused(serve: Serve) -> None:
    model = StubModel()
    model.model.strange = model.model.norm
    del model.model.norm
    assert "no final norm" in Refusal.read(serve(model, FINAL="both").tap).reason


def test_an_error_at_the_start_is_a_refusal(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DumpPublisher, "announce", raises)
    served = serve()
    assert Refusal.read(served.tap).reason == "the plugin could not start: RuntimeError: planted"
    assert served.run([(request(5), 0, 5)]) is not None


def test_a_directory_that_cannot_be_used_is_only_logged(serve: Serve, shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shm / "dumps").write_text("in the way")
    served = serve()
    assert served.run([(request(5), 0, 5)]) is not None
    assert "statetap publishes nothing" in caplog.text
