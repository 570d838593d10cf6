"""The checks that need no prompt: settings, announcements, space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from statetap.runtime.doctor.announcement import examine_announcement, examine_directory, examine_taps
from statetap.runtime.doctor.findings import Finding, Severity
from statetap.runtime.doctor.inputs import DirectoryFacts
from statetap.runtime.doctor.server_settings import examine_settings
from statetap.runtime.doctor.space import examine_space
from statetap_client.schemas import PlainDumps

from tests.fakes.dumps import make_beacon

GIB = 1 << 30
BEACON = make_beacon(num_layers=8, hidden_size=48, aux_layer_ids=(1, 3), final="both", dtype="bfloat16", budget_bytes=GIB)
SERVER = {"version": "0.5.23", "dtype": "bfloat16", "disable_radix_cache": True, "chunked_prefill_size": -1}
MODEL = {"model_path": "org/model"}
DIRECTORY = DirectoryFacts(
    path=Path("/dev/shm/dumps/a"),
    exists=True,
    taps=(BEACON,),
    filesystem="tmpfs",
    total_bytes=8 * GIB,
    free_bytes=8 * GIB,
    memory_limit_bytes=64 * GIB,
)


def severities(findings: list[Finding]) -> dict[str, str]:
    """The worst severity of each check."""
    order = list(Severity)
    worst: dict[str, Severity] = {}
    for finding in findings:
        worst[finding.check] = max(worst.get(finding.check, Severity.OK), finding.severity, key=order.index)
    return {check: str(severity) for check, severity in worst.items()}


# As `/server_info` of a server says when it was started like this.
REFUSED = {
    "pipeline parallelism": {"pp_size": 2},
    "live speculative decoding": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "org/draft"},
    "a draft without a name": {"speculative_draft_model_path": "org/draft"},
    "n-gram speculation": {"speculative_algorithm": "NGRAM", "enable_return_aux_hidden_states": False},
    "two-batch overlap": {"enable_two_batch_overlap": True},
    "layernorm sequence parallelism": {"enable_layernorm_sp": True},
    "decoder bounded replay": {"enable_decoder_swa_bounded_replay": True},
    "encoder bounded replay": {"enable_encoder_swa_bounded_replay": True},
    "split prefill": {"disaggregation_mode": "decode"},
    "diffusion": {"dllm_algorithm": "LowConfidence"},
    "embedding": {"is_embedding": True},
    "encoder": {"encoder_only": True},
}
HARMLESS = {
    "pp_size": 1,
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "enable_two_batch_overlap": False,
    "enable_layernorm_sp": False,
    "enable_decoder_swa_bounded_replay": None,
    "enable_encoder_swa_bounded_replay": False,
    "disaggregation_mode": "null",
    "dllm_algorithm": None,
    "is_embedding": False,
    "encoder_only": False,
    "enable_lora": None,
    "lora_paths": None,
    "nnodes": 1,
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_a_refused_configuration_is_an_error(arguments):
    (finding,) = examine_settings(HARMLESS | arguments, MODEL)
    assert finding.severity is Severity.ERROR
    assert finding.fix


@pytest.mark.parametrize(
    "arguments", [{}, HARMLESS, {"speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True}]
)
def test_a_harmless_one_is_not(arguments):
    (finding,) = examine_settings(arguments, MODEL)
    assert finding.severity is Severity.OK


def test_several_are_all_told():
    found = examine_settings({"pp_size": 2, "enable_layernorm_sp": True}, {"is_generation": False})
    assert [finding.severity for finding in found] == [Severity.ERROR] * 3


@pytest.mark.parametrize(
    ("arguments", "model", "severity"),
    [
        ({}, {"has_image_understanding": True}, "note"),
        ({}, {"has_audio_understanding": True}, "note"),
        ({"language_model_only": True}, {"has_image_understanding": True}, "ok"),
        ({"enable_multimodal": False}, {"has_image_understanding": True}, "ok"),
        ({"nnodes": 2}, {}, "note"),
        ({"enable_lora": True}, {}, "warning"),
        ({"lora_paths": ["x=org/lora"]}, {}, "warning"),
    ],
)
def test_what_is_worth_a_word(arguments, model, severity):
    assert severities(examine_settings(arguments, model)) == {"configuration": severity}


def test_a_sound_announcement():
    found = severities(examine_announcement(BEACON, SERVER, MODEL))
    assert found == {"model": "ok", "dtype": "ok", "layers": "note", "prefix_cache": "ok", "chunking": "ok", "context": "ok"}


def test_a_preset_is_named():
    eagle3 = make_beacon(num_layers=32, aux_layer_ids=(1, 15, 28), final="post_norm")
    found = [one for one in examine_announcement(eagle3, SERVER, MODEL) if one.check == "layers"]
    assert [one.severity for one in found] == [Severity.OK]
    assert "eagle3" in found[0].seen


@pytest.mark.parametrize(
    ("beacon", "arguments", "model", "check", "severity"),
    [
        ({"model_path": "org/other"}, {}, {}, "model", "error"),
        ({}, {}, {"model_path": "org/other"}, "model", "error"),
        ({"dtype": "float16"}, {}, {}, "dtype", "error"),
        ({"dtype": "float32"}, {"dtype": "auto"}, {}, "dtype", "note"),
        ({}, {"disable_radix_cache": False}, {}, "prefix_cache", "warning"),
        ({"radix_cache": True}, {"disable_radix_cache": None}, {}, "prefix_cache", "warning"),
        ({"chunked_prefill_size": 512}, {}, {}, "chunking", "error"),
        ({}, {"chunked_prefill_size": 512}, {}, "chunking", "error"),
        ({"chunked_prefill_size": 512}, {"chunked_prefill_size": 512}, {}, "chunking", "note"),
        ({"chunked_prefill_size": 512}, {"chunked_prefill_size": None}, {}, "chunking", "note"),
    ],
)
def test_announcement_and_server_disagree(beacon, arguments, model, check, severity):
    found = severities(examine_announcement(replace(BEACON, **beacon), SERVER | arguments, MODEL | model))
    assert found[check] == severity


def test_a_declaration_is_held_against_the_server_like_a_beacon():
    declared = PlainDumps(
        kind="plain",
        dir="/dumps",
        aux_layer_ids=[1, 3],
        final="both",
        model_path="org/model",
        model_fingerprint="f",
        num_layers=8,
        hidden_size=48,
        vocab_size=1000,
        dtype="bfloat16",
    )
    assert severities(examine_announcement(declared, SERVER, MODEL))["chunking"] == "ok"
    assert severities(examine_announcement(declared, SERVER | {"chunked_prefill_size": 64}, MODEL))["chunking"] == "error"
    assert severities(examine_announcement(declared, {}, {}))["prefix_cache"] == "note"


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"exists": False, "neighbours": ("b", "c")}, "dump_directory", "beside it there are b, c"),
        ({"taps": ()}, "plugin", "nobody publishes there"),
        ({"taps": (), "refusals": ("layer 40 of 32",)}, "plugin", "refuses to publish: layer 40 of 32"),
        ({"faults": ("tap.json: format_version is 2",)}, "dump_directory", "format_version is 2"),
    ],
)
def test_a_directory_without_a_publisher(changes, check, words):
    (finding,) = examine_directory(replace(DIRECTORY, **changes), plain=False)
    assert (finding.check, finding.severity) == (check, Severity.ERROR)
    assert words in finding.seen


def test_a_plain_directory_needs_no_tap():
    (finding,) = examine_directory(replace(DIRECTORY, taps=()), plain=True)
    assert finding.severity is Severity.OK


def test_taps_of_one_boot_and_the_same_versions():
    taps = tuple(replace(BEACON, dp_rank=rank, dp_size=2) for rank in (0, 1))
    assert severities(examine_taps(taps, SERVER)) == {"versions": "ok"}


@pytest.mark.parametrize(
    ("beacons", "arguments", "check", "severity"),
    [
        ([{}], {"version": "0.5.24"}, "versions", "error"),
        ([{"plugin_version": "0.0.9"}], {}, "versions", "warning"),
        ([{"sglang_version": "embedded-0.1.0"}], {"version": "embedded-0.1.0"}, "versions", "note"),
        ([{}, {"boot_id": "boot2"}], {}, "plugin", "error"),
        ([{"dp_size": 2}], {}, "plugin", "error"),
        ([{"dp_size": 2}, {"dp_rank": 1, "dp_size": 2, "aux_layer_ids": (1, 2)}], {}, "layers", "error"),
    ],
)
def test_taps_that_do_not_go_together(beacons, arguments, check, severity):
    taps = tuple(replace(BEACON, **changes) for changes in beacons)
    assert severities(examine_taps(taps, SERVER | arguments))[check] == severity


def test_bytes_are_estimated():
    found = {finding.check: finding for finding in examine_space(BEACON, DIRECTORY, GIB)}
    # Two layers and both final states of 48 in two bytes each.
    assert found["bytes"].seen.startswith("384 bytes a token")
    assert found["bytes"].seen.endswith("1,000 samples of 2,000 tokens take 768.0 MB")
    assert f"{int(GIB * 0.9) // 384:,} tokens" in found["budget"].seen
    assert {finding.severity for finding in found.values()} == {Severity.OK}


@pytest.mark.parametrize(
    ("beacon", "directory", "budgets", "check", "severity"),
    [
        ({"budget_bytes": 384 * 1000}, {}, GIB, "budget", "warning"),
        ({}, {}, 9 * GIB, "shared_memory", "error"),
        ({}, {"free_bytes": GIB // 2}, GIB, "shared_memory", "warning"),
        ({}, {"free_bytes": GIB // 2, "held_bytes": GIB}, GIB, "shared_memory", "ok"),
        ({}, {"filesystem": "ext4"}, GIB, "shared_memory", "warning"),
        ({}, {"memory_limit_bytes": GIB // 2}, GIB, "memory", "error"),
        ({}, {"memory_limit_bytes": GIB + 1}, GIB, "memory", "warning"),
        ({}, {"memory_limit_bytes": None}, GIB, "memory", "note"),
    ],
)
def test_what_the_budget_does_not_fit(beacon, directory, budgets, check, severity):
    found = severities(examine_space(replace(BEACON, **beacon), replace(DIRECTORY, **directory), budgets))
    assert found[check] == severity


def test_a_finding_against_a_worker_says_how_to_fix_it():
    with pytest.raises(ValueError, match="does not say how to fix it"):
        Finding("chunking", Severity.WARNING, "something")
