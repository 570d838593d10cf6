"""The plugin's hooks over a stub of SGLang: what comes out as dumps must be what the model computes of each prompt alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from statetap_sglang.background import PublishPass
from statetap_sglang.beacon import Beacon

from tests.fakes.served_plugin import LAYERS, Serve, request
from tests.fakes.sglang_stub import PARALLEL, StubModel, StubServer


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
