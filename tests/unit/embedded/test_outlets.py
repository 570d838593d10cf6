from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from statetap.embedded import outlets
from statetap.embedded.capture import as_views
from statetap.embedded.model import TappedModel
from statetap.embedded.options import PlainKind, PublishedBy, WorkerOptions
from statetap.embedded.outlets import PlainOutlet, PluginOutlet, PublishedRows, open_outlet
from statetap_sglang.beacon import Beacon
from statetap_sglang.checksum import differing_rows
from statetap_sglang.format import ROW_CHECKSUMS, TensorView
from statetap_sglang.plain import PlainLayout, is_complete, open_plain_dump
from statetap_sglang.reader import open_dump
from transformers import DynamicCache

Tokens = Callable[[int], tuple[int, ...]]
NAMES = ("aux_hidden_states", "last_hidden_states", "last_hidden_states_prenorm")


@pytest.fixture
def rows(llama: TappedModel, tokens: Tokens) -> PublishedRows:
    prompt = tokens(40)
    return PublishedRows(
        rid="r",
        token_ids=prompt,
        prefix_len=5,
        prompt_len=60,
        forward_pass=3,
        forward_start_ns=10,
        forward_end_ns=20,
        states=llama.run(prompt, DynamicCache()).states,
    )


def test_the_beacon_describes_the_worker(llama: TappedModel, tmp_path: Path) -> None:
    options = WorkerOptions(model_path="m", dump_dir=tmp_path / "d", name="w", chunked_prefill_size=64, budget_bytes=1 << 20)
    outlet = PluginOutlet(llama, options)
    beacon = Beacon.read(outlet.directory)
    assert outlet.directory == tmp_path / "d" / "w" / f"{beacon.boot_id}-0"
    assert (beacon.model_path, beacon.model_fingerprint, beacon.num_layers, beacon.hidden_size) == ("m", llama.fingerprint, 4, 64)
    assert (beacon.vocab_size, beacon.aux_layer_ids, beacon.final, beacon.dtype) == (1024, (0, 1, 2, 3), "both", "float32")
    assert (beacon.radix_cache, beacon.chunked_prefill_size, beacon.context_length) == (False, 64, 512)
    assert (beacon.budget_bytes, beacon.pid) == (1 << 20, os.getpid())
    outlet.close()
    again = PluginOutlet(llama, options)
    assert again.directory != outlet.directory
    again.close()


def test_a_plugin_dump_holds_the_rows_bit_for_bit(llama: TappedModel, rows: PublishedRows, tmp_path: Path) -> None:
    outlet = PluginOutlet(llama, WorkerOptions(model_path="m", dump_dir=tmp_path / "d"))
    assert outlet.publish(rows) == f"{outlet.directory.name}/req_0"
    with open_dump(outlet.directory / "req_0.safetensors") as dump:
        meta = dump.metadata
        assert (meta.rid, meta.prefix_len, meta.extend_len, meta.prompt_len) == ("r", 5, 40, 60)
        assert (meta.forward_pass, meta.forward_start_ns, meta.forward_end_ns, meta.retraction_count) == (3, 10, 20, 0)
        assert bytes(dump.tensors["token_ids"].data) == torch.tensor(rows.token_ids, dtype=torch.int32).numpy().tobytes()
        for name in NAMES:
            assert bytes(dump.tensors[name].data) == rows.states[name].contiguous().numpy().tobytes()
    outlet.close()


def test_a_plugin_dump_carries_what_its_rows_added_up_to_before_they_were_handed_on(
    llama: TappedModel, rows: PublishedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlet = PluginOutlet(llama, WorkerOptions(model_path="m", dump_dir=tmp_path / "d"))
    outlet.publish(rows)

    def torn(states: Mapping[str, torch.Tensor]) -> dict[str, TensorView]:
        changed = {name: tensor.clone() for name, tensor in states.items()}
        changed["last_hidden_states"][7, 3] += 1
        return as_views(changed)

    monkeypatch.setattr(outlets, "as_views", torn)
    outlet.publish(rows)
    with open_dump(outlet.directory / "req_0.safetensors") as whole, open_dump(outlet.directory / "req_1.safetensors") as changed:
        assert ROW_CHECKSUMS in whole.tensors
        assert differing_rows(whole.tensors) == []
        assert differing_rows(changed.tensors) == [7]
    outlet.close()


def test_what_exceeds_the_budget_is_reported_and_no_error_here(llama: TappedModel, rows: PublishedRows, tmp_path: Path) -> None:
    outlet = PluginOutlet(llama, WorkerOptions(model_path="m", dump_dir=tmp_path / "d", budget_bytes=8192))
    assert outlet.publish(rows) == f"{outlet.directory.name}/req_0"
    assert not list(outlet.directory.glob("req_*.safetensors"))
    [lost] = outlet.directory.glob("req_*.error.json")
    assert lost.name == "req_0.error.json", "the error stands under the name that the answer gives"
    assert '"r"' in lost.read_text()
    outlet.close()


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("published_by", ["rename", "DONE", "meta.json"])
def test_a_plain_dump_holds_the_rows_and_no_identity(
    llama: TappedModel, rows: PublishedRows, tmp_path: Path, kind: PlainKind, published_by: PublishedBy
) -> None:
    options = WorkerOptions(model_path="m", dump_dir=tmp_path / "d", plain=kind, plain_published_by=published_by)
    outlet = open_outlet(llama, options)
    assert isinstance(outlet, PlainOutlet)
    outlet.publish(rows)
    outlet.publish(rows)
    layout = PlainLayout.default(aux_layers=4, final="both", kind=kind, published_by=published_by)
    assert sorted(p.name for p in outlet.directory.iterdir()) == ["req_0", "req_1"]
    assert is_complete(outlet.directory / "req_1", layout)
    with open_plain_dump(outlet.directory / "req_1", layout) as dump:
        for name in NAMES:
            assert bytes(dump.tensors[name].data) == rows.states[name].contiguous().numpy().tobytes()
    outlet.close()


def test_a_plain_dump_that_cannot_be_written_is_no_error_here(llama: TappedModel, rows: PublishedRows, tmp_path: Path) -> None:
    outlet = PlainOutlet(llama, WorkerOptions(model_path="m", dump_dir=tmp_path / "d", plain="safetensors"))
    outlet.directory.rmdir()
    outlet.publish(rows)
    assert not outlet.directory.exists()
