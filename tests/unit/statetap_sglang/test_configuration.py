from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang.configuration import (
    ConfigurationRefused,
    ServerFacts,
    budget_bytes,
    refuse_capture,
    refuse_configuration,
    ring_bytes,
    worker_name,
)
from statetap_sglang.layers import plan_layers
from statetap_sglang.layout import CaptureLayout
from statetap_sglang.settings import PluginSettings

FACTS = ServerFacts(
    sglang_version="0.5.23",
    model_path="org/model",
    num_layers=30,
    hidden_size=576,
    vocab_size=1000,
    dtype="bfloat16",
    context_length=8192,
    chunked_prefill_size=2048,
    max_pass_tokens=2048,
    radix_cache=True,
    port=30000,
    dp_rank=0,
    dp_size=1,
    tp_size=1,
    pp_size=1,
    publishes=True,
    speculative=False,
    two_batch_overlap=False,
    layernorm_sp=False,
    bounded_replay=False,
    pd_multiplexing=False,
    prefill_graph=False,
    capture_layer_ids=None,
)


def facts(**changes: Any) -> ServerFacts:
    return dataclasses.replace(FACTS, **changes)


def settings(directory: Path = Path("/dev/shm/statetap"), **changes: Any) -> PluginSettings:
    return PluginSettings(directory=directory, **changes)


def test_a_server_without_oddities_is_served() -> None:
    refuse_configuration(FACTS, settings())
    refuse_configuration(facts(sglang_version="0.5.20"), settings())
    refuse_configuration(facts(sglang_version="0.5.23.post1"), settings())


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"sglang_version": "0.5.24"}, "STATETAP_PLUGIN_FORCE=1"),
        ({"sglang_version": "0.0.0.dev0"}, "STATETAP_PLUGIN_FORCE=1"),
        ({"sglang_version": "0.5.2"}, "STATETAP_PLUGIN_FORCE=1"),
        ({"pp_size": 2}, "use tensor parallelism"),
        ({"speculative": True}, "without --speculative-algorithm"),
        ({"two_batch_overlap": True}, "without --enable-two-batch-overlap"),
        ({"layernorm_sp": True}, "without --enable-layernorm-sp"),
        ({"bounded_replay": True}, "--no-enable-decoder-swa-bounded-replay"),
        ({"pd_multiplexing": True}, "without --enable-pdmux"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_a_way_out(changes: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ConfigurationRefused, match=way_out):
        refuse_configuration(facts(**changes), settings())


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(ConfigurationRefused, match=r"pipeline parallelism.*speculative decoding"):
        refuse_configuration(facts(pp_size=2, speculative=True), settings())


def test_an_unknown_version_can_be_forced() -> None:
    refuse_configuration(facts(sglang_version="0.6.0"), settings(force=True))


def test_nothing_to_capture_is_refused() -> None:
    with pytest.raises(ConfigurationRefused, match="nothing to capture"):
        refuse_configuration(FACTS, settings(layers="none", final="none"))


@pytest.mark.parametrize(
    ("layers", "final", "refused"),
    [("eagle3", "post_norm", False), ("eagle3", "pre_norm", True), ("eagle3", "both", True), ((29,), "post_norm", True)],
)
def test_the_state_before_the_norm_and_prefill_graphs_exclude_each_other(
    layers: str | tuple[int, ...], final: str, refused: bool
) -> None:
    plan = plan_layers(layers, 30)
    if refused:
        with pytest.raises(ConfigurationRefused, match="--disable-prefill-cuda-graph"):
            refuse_capture(facts(prefill_graph=True), settings(layers=layers, final=final), plan)
    else:
        refuse_capture(facts(prefill_graph=True), settings(layers=layers, final=final), plan)
    refuse_capture(FACTS, settings(layers=layers, final=final), plan)


def test_the_flags_layer_ids_must_be_the_plugins() -> None:
    plan = plan_layers((1, 14, 29), 30)
    refuse_capture(facts(capture_layer_ids=(14, 1)), settings(), plan)
    with pytest.raises(ConfigurationRefused, match=r"is \[1, 14, 29\], the plugin needs \[1, 14\]"):
        refuse_capture(facts(capture_layer_ids=(1, 14, 29)), settings(), plan)


def test_the_ring_holds_two_passes_of_the_largest_size() -> None:
    layout = CaptureLayout(aux_layers=3, final="both", hidden_size=576, dtype="bfloat16")
    assert ring_bytes(FACTS, settings(), layout) == 2 * layout.span_bytes(2048)
    assert ring_bytes(facts(max_pass_tokens=1), settings(), layout) == 16 << 20
    assert ring_bytes(FACTS, settings(ring_bytes=12345), layout) == 12345


def cgroup(root: Path, limit: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/memory.max").write_text(limit)
    return root


def test_the_default_budget_is_half_of_what_there_is(tmp_path: Path, shm: Path) -> None:
    root = cgroup(tmp_path, str(1 << 30))
    assert budget_bytes(FACTS, settings(shm / "dumps"), root) == 1 << 29
    assert budget_bytes(facts(dp_size=4), settings(shm / "dumps"), root) == 1 << 27


def test_a_budget_above_the_memory_limit_is_refused(tmp_path: Path, shm: Path) -> None:
    root = cgroup(tmp_path, str(1 << 30))
    assert budget_bytes(FACTS, settings(shm, budget_bytes=1 << 30), root) == 1 << 30
    with pytest.raises(ConfigurationRefused, match="control group may hold"):
        budget_bytes(FACTS, settings(shm, budget_bytes=(1 << 30) + 1), root)
    with pytest.raises(ConfigurationRefused, match="for each of 2 data-parallel ranks"):
        budget_bytes(facts(dp_size=2), settings(shm, budget_bytes=1 << 30), root)


def test_a_budget_above_the_tmpfs_is_refused(tmp_path: Path, shm: Path) -> None:
    with pytest.raises(ConfigurationRefused, match="enlarge the tmpfs"):
        budget_bytes(FACTS, settings(shm, budget_bytes=1 << 60), cgroup(tmp_path, "max"))


def test_the_workers_name_can_be_part_of_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_name(settings(worker="w0"), 30000) == "w0"
    monkeypatch.setattr("socket.gethostname", lambda: "-odd host/name")
    assert worker_name(settings(), 30000) == "odd-host-name-30000"
