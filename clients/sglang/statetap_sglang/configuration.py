"""What the plugin must know of a server, and which servers it refuses: those whose states would be wrong, or not all there."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from statetap_sglang.layers import LayerPlan
from statetap_sglang.layout import CaptureLayout
from statetap_sglang.memory_limit import memory_limit
from statetap_sglang.settings import BUDGET_BYTES, DIRECTORY, FINAL, FORCE, LAYERS, PluginSettings

# Ran and compared with Hugging Face by the tests in tests/e2e.
KNOWN_VERSIONS = ("0.5.20", "0.5.23")

# The default budget: this share of the smaller of tmpfs and memory limit, divided among the data-parallel ranks.
_BUDGET_SHARE = 2
# The default ring: so many passes of the largest size.
_RING_PASSES = 2
_MIN_RING_BYTES = 16 << 20


class ConfigurationRefused(RuntimeError):
    """A server that the plugin must not serve: the message names the setting, the reason and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One SGLang server, seen from one of its scheduler processes.

    `max_pass_tokens` bounds the prompt tokens of one pass. `prefill_graph`: the model's body may be replayed from a CUDA graph,
    and then no hook inside it runs. `capture_layer_ids` are those of `--return-aux-hidden-state-layer-ids`, as given.
    """

    sglang_version: str
    model_path: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    context_length: int
    chunked_prefill_size: int | None
    max_pass_tokens: int
    radix_cache: bool
    port: int
    dp_rank: int
    dp_size: int
    tp_size: int
    pp_size: int
    publishes: bool
    speculative: bool
    two_batch_overlap: bool
    layernorm_sp: bool
    bounded_replay: bool
    pd_multiplexing: bool
    prefill_graph: bool
    capture_layer_ids: tuple[int, ...] | None


def refuse_configuration(facts: ServerFacts, settings: PluginSettings) -> None:
    """ConfigurationRefused if the states of such a server cannot be captured, with all reasons there are."""
    version = facts.sglang_version
    known = re.match(r"[0-9]+\.[0-9]+\.[0-9]+", version)
    refusals = {
        f"SGLang {version} is not among the versions that this plugin was tested with ({', '.join(KNOWN_VERSIONS)}); "
        f"install one of those, or set {FORCE}=1 and compare its states with a reference": not settings.force
        and (known is None or known[0] not in KNOWN_VERSIONS),
        f"pipeline parallelism (--pp-size {facts.pp_size}): no rank sees all layers; use tensor parallelism": facts.pp_size > 1,
        "speculative decoding is on: draft and verify passes go through the same forward path; "
        "start the server without --speculative-algorithm, or with --enable-return-aux-hidden-states": facts.speculative,
        "two-batch overlap splits a pass into two; start the server without --enable-two-batch-overlap": facts.two_batch_overlap,
        "layer norm sequence parallelism spreads a pass's rows over ranks; "
        "start the server without --enable-layernorm-sp": facts.layernorm_sp,
        "decoder bounded replay is not equivalent to a full prefill; "
        "start the server with --no-enable-decoder-swa-bounded-replay": facts.bounded_replay,
        "PD multiplexing splits a pass by layers; start the server without --enable-pdmux": facts.pd_multiplexing,
        f"{LAYERS}=none and {FINAL}=none leave nothing to capture; name a layer or a final state": settings.layers == "none"
        and settings.final == "none",
    }
    if reasons := [reason for reason, applies in refusals.items() if applies]:
        raise ConfigurationRefused("; ".join(reasons))


def refuse_capture(facts: ServerFacts, settings: PluginSettings, plan: LayerPlan) -> None:
    """ConfigurationRefused if this server cannot give what is asked for."""
    needs_pre_norm = settings.final in ("pre_norm", "both") or plan.has_last
    if needs_pre_norm and facts.prefill_graph:
        raise ConfigurationRefused(
            f"the state before the final norm ({FINAL}={settings.final}, layers {list(plan.aux_layer_ids)}) cannot be seen while "
            "prefill runs from CUDA graphs; start the server with --disable-prefill-cuda-graph"
        )
    given = facts.capture_layer_ids
    if given is not None and tuple(sorted(given)) != plan.from_setter:
        raise ConfigurationRefused(
            f"--return-aux-hidden-state-layer-ids is {list(given)}, the plugin needs {list(plan.from_setter)}, and SGLang ends "
            f"the server when their number differs; leave that flag out, or set {LAYERS}"
        )


def ring_bytes(facts: ServerFacts, settings: PluginSettings, layout: CaptureLayout) -> int:
    """The ring's size: as set, else room for two of the largest passes."""
    if settings.ring_bytes is not None:
        return settings.ring_bytes
    return max(_MIN_RING_BYTES, _RING_PASSES * layout.span_bytes(facts.max_pass_tokens))


def budget_bytes(facts: ServerFacts, settings: PluginSettings, root: Path = Path("/")) -> int:
    """The tap's budget: as set, else half of what tmpfs and memory limit allow, shared by the data-parallel ranks.

    Raises:
        ConfigurationRefused: more than the tmpfs, or the memory limit of this process, can ever hold.
        OSError: the directory cannot be looked at.
    """
    settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.statvfs(settings.directory)
    size, limit = status.f_blocks * status.f_frsize, memory_limit(root)
    if settings.budget_bytes is None:
        return min(size, size if limit is None else limit) // _BUDGET_SHARE // facts.dp_size
    together = settings.budget_bytes * facts.dp_size
    asked = f"{BUDGET_BYTES}={settings.budget_bytes} for each of {facts.dp_size} data-parallel ranks"
    if limit is not None and together > limit:
        raise ConfigurationRefused(
            f"{asked} is above the {limit} bytes that this process's control group may hold, dumps among them; "
            "lower it, or raise the limit"
        )
    if together > size:
        raise ConfigurationRefused(
            f"{asked} is above the {size} bytes of the file system of {DIRECTORY}; lower it, or enlarge the tmpfs"
        )
    return settings.budget_bytes


def worker_name(settings: PluginSettings, port: int) -> str:
    """The tap's directory below the dump root: as set, else host name and port."""
    if settings.worker is not None:
        return settings.worker
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("-.") or "host"
    return f"{host[:150]}-{port}"
