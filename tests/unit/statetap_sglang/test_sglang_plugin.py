"""The plugin's hooks over a stub of SGLang: what comes out as dumps must be what the model computes of each prompt alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from statetap_sglang.background import PublishPass
from statetap_sglang.beacon import Beacon
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.reader import MappedDump, open_dump
from statetap_sglang.refusal import Refusal
from statetap_sglang.tap import tap_is_alive

from tests.fakes.sglang_stub import PARALLEL, HookRegistry, StubModel, StubRequest, StubServer, stubbed_sglang

LAYERS = 6


class Served:
    """A stub server with the plugin in it, and what it published."""

    def __init__(self, module: Any, root: Path, model: StubModel | None, arguments: dict[str, Any]) -> None:
        self.plugin = HookRegistry.hooks[module.LOADED][0].__self__
        self.root = root
        self.server = StubServer(module, model, **arguments)
        self.model = self.server.model

    @property
    def tap(self) -> Path:
        (tap,) = (self.root / "w").iterdir()
        return tap

    def run(self, *args: Any, **kwargs: Any) -> Any:
        result = self.server.run(*args, **kwargs)
        if self.plugin.open is not None:
            self.plugin.open.background.drain()
        return result

    def dumps(self, rid: str | None = None) -> list[MappedDump]:
        dumps = [open_dump(path) for path in self.tap.glob("req_*.safetensors")]
        for dump in dumps:
            dump.verify_rows()
        chosen = [dump for dump in dumps if rid in (None, dump.metadata.rid)]
        return sorted(chosen, key=lambda dump: (dump.metadata.rid, dump.metadata.forward_pass))

    def errors(self) -> dict[str, str]:
        return {record.rid: record.reason for record in map(ErrorRecord.read, self.tap.glob("req_*.error.json"))}

    def demand(self, request: StubRequest, ranges: list[tuple[int, int]], retraction: int = 0) -> None:
        """The request's dumps hold exactly these ranges, `[prefix, end)`, of its prompt's states."""
        dumps = [dump for dump in self.dumps(request.rid) if dump.metadata.retraction_count == retraction]
        assert [(d.metadata.prefix_len, d.metadata.prefix_len + d.metadata.extend_len) for d in dumps] == ranges
        reference = self.model.reference(request.origin_input_ids)
        beacon = Beacon.read(self.tap)
        for dump, (start, stop) in zip(dumps, ranges, strict=True):
            assert dump.metadata.prompt_len == len(request.origin_input_ids)
            assert array(dump, "token_ids").tolist() == request.origin_input_ids[start:stop]
            expected = {"last_hidden_states": reference["post_norm"], "last_hidden_states_prenorm": reference["pre_norm"]}
            if beacon.aux_layer_ids:
                expected["aux_hidden_states"] = torch.stack([reference[f"L{i}"] for i in beacon.aux_layer_ids], dim=1)
            for name in dump.tensors.keys() - {"token_ids", "row_checksums"}:
                np.testing.assert_allclose(array(dump, name), expected[name][start:stop].numpy(), rtol=1e-6, atol=1e-7)


def array(dump: MappedDump, name: str) -> np.ndarray[Any, Any]:
    view = dump.tensors[name]
    return np.frombuffer(view.data, {"F32": np.float32, "I32": np.int32}[view.dtype]).reshape(view.shape)


Serve = Callable[..., Served]


@pytest.fixture
def serve(shm: Path) -> Iterator[Serve]:
    opened: list[Served] = []
    with stubbed_sglang() as module:

        def serve(model: StubModel | None = None, *, arguments: dict[str, Any] | None = None, **variables: str) -> Served:
            environment = {"DIR": str(shm / "dumps"), "WORKER": "w", "BOOT_ID": "boot", "BUDGET_BYTES": "16M"} | variables
            module.register_hooks({f"STATETAP_PLUGIN_{name}": value for name, value in environment.items()})
            opened.append(Served(module, shm / "dumps", model, arguments or {}))
            return opened[-1]

        yield serve
        for served in opened:
            if served.plugin.open is not None:
                assert served.plugin.open.tap._ring.held == 0
                served.plugin.open.close()


_ids = itertools.count(1)


def request(length: int, **changes: Any) -> StubRequest:
    number = next(_ids)
    prompt = [(number * 7 + 3 * i) % 50 for i in range(length)]
    return StubRequest(f"rid-{number}", prompt, **changes)


@pytest.mark.parametrize("final", ["post_norm", "pre_norm", "both"])
@pytest.mark.parametrize("layers", ["eagle3", "all", "none", "0", "5", "2,5", "1,3,4"])
def test_every_layer_and_final_state(serve: Serve, layers: str, final: str) -> None:
    served = serve(LAYERS=layers, FINAL=final)
    one = request(20)
    served.run([(one, 0, 20)])
    served.demand(one, [(0, 20)])
    (dump,) = served.dumps()
    assert ("last_hidden_states_prenorm" in dump.tensors) == (final != "post_norm")
    assert ("last_hidden_states" in dump.tensors) == (final != "pre_norm")
    assert ("aux_hidden_states" in dump.tensors) == (layers != "none")


def test_layers_without_a_final_state(serve: Serve) -> None:
    served = serve(LAYERS="1,5", FINAL="none")
    one = request(20)
    served.run([(one, 0, 20)])
    served.demand(one, [(0, 20)])
    assert served.dumps()[0].tensors.keys() == {"token_ids", "aux_hidden_states", "row_checksums"}


def test_prompts_that_share_passes(serve: Serve) -> None:
    served = serve(LAYERS="all", FINAL="both")
    first, second, third = request(30), request(25), request(40)
    served.run([(first, 0, 30), (second, 0, 25), (third, 0, 9)])
    served.run([(third, 9, 31)])
    served.demand(first, [(0, 30)])
    served.demand(second, [(0, 25)])
    served.demand(third, [(0, 9), (9, 40)])


def test_decode_rows_mixed_into_an_extend_pass(serve: Serve) -> None:
    served = serve(LAYERS="all", FINAL="both")
    old, new = request(10), request(20)
    served.run([(old, 0, 10)])
    old.output_ids = (5,)
    result = served.run([(old, 10, 1), (new, 0, 20)], mode="MIXED")
    served.demand(old, [(0, 10)])
    served.demand(new, [(0, 20)])
    assert result.customized_info["statetap_dumps"] == [None, ["boot-0/req_1"]]


def test_a_prefix_hit(serve: Serve) -> None:
    served = serve()
    one = request(40)
    served.run([(one, 39, 1)])
    served.demand(one, [(39, 40)])


def test_a_retracted_request_extends_again(serve: Serve) -> None:
    served = serve()
    one = request(40)
    served.run([(one, 0, 40)])
    one.output_ids, one.retraction_count = (3, 4), 1
    served.run([(one, 0, 30)])
    served.run([(one, 30, 12)])  # beyond the prompt
    served.demand(one, [(0, 40)])
    served.demand(one, [(0, 30)], retraction=1)


@pytest.mark.parametrize(
    "mode", ["DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "DLLM_EXTEND", "PREBUILT"]
)
def test_other_modes_are_not_published(serve: Serve, mode: str) -> None:
    served = serve()
    result = served.run([(request(5), 0, 5)], mode=mode)
    assert served.dumps() == []
    assert served.errors() == {}
    assert result.customized_info is None


def test_a_dummy_batch_is_not_published(serve: Serve) -> None:
    served = serve()
    served.run([(request(5), 0, 5)], rids=None)
    served.run([(request(5), 0, 5)], rids=[], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[5])
    assert served.dumps() == []
    assert served.errors() == {}


def test_padding_after_the_last_request_is_cut_off(serve: Serve) -> None:
    served = serve(LAYERS="all", FINAL="both")
    one, two = request(9), request(4)
    served.run([(one, 0, 9), (two, 0, 4)], padding=3)
    served.demand(one, [(0, 9)])
    served.demand(two, [(0, 4)])


def test_surplus_rows_where_nothing_is_padded_are_refused(serve: Serve) -> None:
    served = serve()
    one = request(9)
    served.run([(one, 0, 9)], padding=3, global_num_tokens_cpu=None)
    assert "has 12 rows, the pass's requests have 9" in served.errors()[one.rid]
    assert served.dumps() == []


def test_buffers_that_change_after_the_pass_do_not_matter(serve: Serve) -> None:
    served = serve(LAYERS="all", FINAL="both")
    gate = threading.Event()
    served.plugin.open.background.publish(PublishPass(SimpleNamespace(wait=gate.wait), lambda: None, ()))
    one, two = request(30), request(30)
    served.server.run([(one, 0, 30)])  # nothing is published before both passes are over and their buffers overwritten
    served.server.run([(two, 0, 30)])
    gate.set()
    served.plugin.open.background.drain()
    served.demand(one, [(0, 30)])
    served.demand(two, [(0, 30)])


def test_responses_name_all_dumps_of_a_request(serve: Serve) -> None:
    served = serve()
    one, two = request(40), request(8)
    first = served.run([(one, 0, 20)])
    assert first.customized_info == {"statetap_dumps": [["boot-0/req_0"]]}
    last = served.run([(two, 0, 8), (one, 20, 20)])
    assert last.customized_info == {"statetap_dumps": [["boot-0/req_1"], ["boot-0/req_0", "boot-0/req_2"]]}
    assert {f"{served.tap.name}/{d.path.name}" for d in served.dumps(one.rid)} == {
        "boot-0/req_0.safetensors",
        "boot-0/req_2.safetensors",
    }


def test_customized_info_of_others_stays(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setattr(StubServer, "_logits", lambda *_: SimpleNamespace(customized_info={"theirs": [1]}))
    result = served.run([(request(5), 0, 5)])
    assert result.customized_info == {"theirs": [1], "statetap_dumps": [["boot-0/req_0"]]}


@pytest.mark.parametrize("rank", [{"attn_tp_rank": 1}, {"attn_cp_rank": 1}])
def test_other_ranks_capture_but_do_not_publish(serve: Serve, monkeypatch: pytest.MonkeyPatch, rank: dict[str, int]) -> None:
    for name, value in rank.items():
        monkeypatch.setattr(PARALLEL, name, value)
    served = serve(LAYERS="1,3")
    served.run([(request(5), 0, 5)])
    assert not served.root.exists()
    assert served.model.model.layers_to_capture == [2, 4]


def test_data_parallel_ranks_have_taps_of_their_own(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PARALLEL, "dp_rank", 3)
    assert serve().tap.name == "boot-3"
    monkeypatch.setattr(PARALLEL, "dp_rank", None)
    monkeypatch.setattr(PARALLEL, "attn_dp_rank", 2)
    assert {tap.name for tap in (serve().root / "w").iterdir()} == {"boot-2", "boot-3"}


def test_draft_models_are_not_tapped(serve: Serve) -> None:
    served = serve()
    draft = SimpleNamespace(**(vars(served.server.runner) | {"is_draft_worker": True, "model": StubModel()}))
    served.plugin.after_loading(None, draft)
    assert draft.model.model.layers_to_capture == []
    served.server.runner = draft
    served.run([(request(5), 0, 5)])
    assert served.dumps() == []


def test_the_beacon_says_what_the_server_is(serve: Serve) -> None:
    served = serve(arguments={"disable_radix_cache": True, "chunked_prefill_size": -1, "tp_size": 2, "dp_size": 2}, FINAL="both")
    beacon = Beacon.read(served.tap)
    assert beacon == replace(
        beacon,
        boot_id="boot",
        dp_rank=0,
        sglang_version="0.5.23",
        model_path="org/stub",
        num_layers=LAYERS,
        hidden_size=8,
        vocab_size=50,
        aux_layer_ids=(1, 2),
        final="both",
        dtype="float32",
        tp_size=2,
        dp_size=2,
        budget_bytes=16 << 20,
        radix_cache=False,
        chunked_prefill_size=None,
        context_length=512,
    )
    assert len(beacon.model_fingerprint) == 64


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
