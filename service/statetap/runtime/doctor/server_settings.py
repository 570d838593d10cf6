"""Reads `/server_info` and `/model_info` for settings under which a server's states are not what they seem.

The names of arguments are SGLang 0.5.23's (`srt/arg_groups/fields/`, after its own resolution). An argument that a server does
not have is one that it cannot have set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from statetap.runtime.doctor.findings import Finding, error, note, ok, warning

CHECK = "configuration"
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _RefusedSetting:
    """A setting that no extraction may run under."""

    is_set: Callable[[Arguments], bool]
    why: str
    fix: str


def _live_speculation(arguments: Arguments) -> bool:
    """With --enable-return-aux-hidden-states the algorithm only names a convention, and no draft is loaded."""
    if arguments.get("speculative_draft_model_path"):
        return True
    return bool(arguments.get("speculative_algorithm")) and not arguments.get("enable_return_aux_hidden_states")


_REFUSED = (
    _RefusedSetting(
        lambda given: (given.get("pp_size") or 1) > 1,
        "pipeline parallelism: no process has all layers",
        "start the server without --pp-size; use --tp-size instead",
    ),
    _RefusedSetting(
        _live_speculation,
        "live speculative decoding: draft and verify passes run beside those of the prompt",
        "start the server without --speculative-algorithm and --speculative-draft-model-path "
        "(with --enable-return-aux-hidden-states the algorithm alone may stay)",
    ),
    _RefusedSetting(
        lambda given: bool(given.get("enable_two_batch_overlap")),
        "two-batch overlap: a pass is run as two, with rows of their own",
        "start the server without --enable-two-batch-overlap",
    ),
    _RefusedSetting(
        lambda given: bool(given.get("enable_layernorm_sp")),
        "layernorm sequence parallelism: each rank has a part of the rows only",
        "start the server without --enable-layernorm-sp",
    ),
    _RefusedSetting(
        lambda given: bool(given.get("enable_decoder_swa_bounded_replay")),
        "DeepSeek-V4.1's decoder bounded replay: not equal to a full prefill",
        "start the server with --no-enable-decoder-swa-bounded-replay",
    ),
    _RefusedSetting(
        lambda given: bool(given.get("enable_encoder_swa_bounded_replay")),
        "DeepSeek-V4.1's encoder bounded replay: rows are run again on prefix hits",
        "start the server without --enable-encoder-swa-bounded-replay",
    ),
    _RefusedSetting(
        lambda given: given.get("disaggregation_mode") not in (None, "", "null"),
        "prefill and decode are split over servers: a request's prompt may run elsewhere",
        "start a server of its own for extraction, without --disaggregation-mode",
    ),
    _RefusedSetting(
        lambda given: bool(given.get("dllm_algorithm")),
        "a diffusion language model: rows of a prompt are run more than once",
        "extract from an autoregressive model",
    ),
    _RefusedSetting(
        lambda given: bool(given.get("is_embedding") or given.get("encoder_only")),
        "the server does not generate text: it has no causal prefill to capture",
        "start it without --is-embedding and --encoder-only",
    ),
)


def examine_settings(arguments: Arguments, model: Arguments) -> list[Finding]:
    """Every setting that is refused, and those that are worth a word; one finding that all is well if there is none."""
    findings = [error(CHECK, setting.why, setting.fix) for setting in _REFUSED if setting.is_set(arguments)]
    if model.get("is_generation") is False and not arguments.get("is_embedding"):
        findings.append(error(CHECK, "the model does not generate text", "serve a causal language model"))
    if arguments.get("lora_paths") or arguments.get("enable_lora"):
        findings.append(
            warning(
                CHECK,
                "LoRA is enabled: a request without an adapter gets the base model's states",
                "serve the merged model, so that its fingerprint says what the states are of",
            )
        )
    if _sees_or_hears(model) and not (arguments.get("language_model_only") or arguments.get("enable_multimodal") is False):
        findings.append(
            note(
                CHECK,
                "the model also takes images or audio; Statetap sends text only",
                "start the server with --language-model-only to free the encoder's memory",
            )
        )
    if (nodes := arguments.get("nnodes") or 1) > 1:
        findings.append(
            note(
                CHECK,
                f"the server spans {nodes} machines; each tap is on the machine of its rank",
                "examine the taps on each machine from that machine",
            )
        )
    return findings or [ok(CHECK, "nothing that extraction must refuse")]


def _sees_or_hears(model: Arguments) -> bool:
    return bool(model.get("has_image_understanding") or model.get("has_audio_understanding"))
