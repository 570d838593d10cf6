"""Opens a tap on a model that is loaded: layers asked for and read back, directory locked, ring allocated, beacon written.

Or refuses, and says so in the tap's directory, where the service looks for the beacon.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import statetap_sglang
from statetap_sglang.background import BackgroundPublisher
from statetap_sglang.beacon import Beacon
from statetap_sglang.configuration import (
    ConfigurationRefused,
    ServerFacts,
    budget_bytes,
    refuse_capture,
    refuse_configuration,
    ring_bytes,
    worker_name,
)
from statetap_sglang.free_files import RECYCLE_FROM_BYTES
from statetap_sglang.host_registration import CudaRegistration
from statetap_sglang.in_place import InPlacePublisher
from statetap_sglang.layers import LayerPlan, capture_layers, find_final_norm, plan_layers
from statetap_sglang.layout import CaptureLayout
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.refusal import Refusal
from statetap_sglang.settings import PINNED_DUMP_BYTES, PluginSettings
from statetap_sglang.snapshot import SnapshotRing
from statetap_sglang.state_tap import StateTap
from statetap_sglang.tap import ensure_private_directory, lock_tap, tap_name

log = logging.getLogger("statetap")


@dataclass(frozen=True, slots=True)
class OpenTap:
    """An open tap. `final_norm` is the module whose states `tap.take_pre_norm` wants, None if it wants none."""

    tap: StateTap
    final_norm: nn.Module | None
    background: BackgroundPublisher
    publisher: DumpPublisher

    def close(self) -> None:
        """Publish what is waiting, then release the directory's lock."""
        self.background.close()
        self.publisher.close()


def prepare_model(settings: PluginSettings, facts: ServerFacts, model: nn.Module) -> LayerPlan:
    """Make a model capture what is asked for. On every rank, for all ranks must run the same model.

    Raises:
        ConfigurationRefused, LayersRefused: with the reason and the way out.
    """
    refuse_configuration(facts, settings)
    plan = plan_layers(settings.layers, facts.num_layers)
    refuse_capture(facts, settings, plan)
    capture_layers(model, plan.from_setter)
    return plan


def open_tap(
    settings: PluginSettings, facts: ServerFacts, plan: LayerPlan, model: nn.Module, fingerprint: Callable[[], str]
) -> OpenTap:
    """Open the tap of a prepared model. On the publishing rank alone.

    Raises:
        ConfigurationRefused, TapError, OSError, ValueError: with the reason.
    """
    boot_id = required_boot_id(settings)
    norm = _final_norm(settings, facts, plan, model)
    layout = CaptureLayout(
        aux_layers=len(plan.aux_layer_ids), final=settings.final, hidden_size=facts.hidden_size, dtype=facts.dtype
    )
    beacon = Beacon(
        boot_id=boot_id,
        dp_rank=facts.dp_rank,
        plugin_version=statetap_sglang.__version__,
        sglang_version=facts.sglang_version,
        model_path=facts.model_path,
        model_fingerprint=fingerprint(),
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        aux_layer_ids=plan.aux_layer_ids,
        final=settings.final,
        dtype=facts.dtype,
        tp_size=facts.tp_size,
        dp_size=facts.dp_size,
        pid=os.getpid(),
        budget_bytes=budget_bytes(facts, settings),
        radix_cache=facts.radix_cache,
        chunked_prefill_size=facts.chunked_prefill_size,
        context_length=facts.context_length,
        recycle_from_bytes=RECYCLE_FROM_BYTES,
    )
    device = next(model.parameters()).device
    ring = SnapshotRing(layout, ring_bytes(facts, settings, layout), device)
    publisher = _publisher(settings, facts, beacon, ring, device)
    try:
        background = BackgroundPublisher(publisher, in_place=publisher if isinstance(publisher, InPlacePublisher) else None)
        tap = StateTap(
            plan=plan,
            ring=ring,
            background=background,
            reserve_number=publisher.reserve,
            # Not `norm(…)`, which would run the hook that takes the model's own pre-norm states.
            norm=None if norm is None else norm.forward,
            boot_id=boot_id,
            tap_name=tap_name(boot_id, facts.dp_rank),
        )
        publisher.announce()
    except BaseException:
        publisher.close()
        raise
    return OpenTap(tap, norm, background, publisher)


def _publisher(
    settings: PluginSettings, facts: ServerFacts, beacon: Beacon, ring: SnapshotRing, device: torch.device
) -> DumpPublisher:
    """The tap's publisher; on CUDA, where the user wants it, one in whose files snapshots land."""
    worker, limit = worker_name(settings, facts.port), settings.pinned_dump_bytes
    if limit is None:
        return DumpPublisher(settings.directory, worker, beacon)
    if device.type != "cuda":
        log.warning("%s has no effect: the model is on %s, not on CUDA", PINNED_DUMP_BYTES, device)
        return DumpPublisher(settings.directory, worker, beacon)
    registration = CudaRegistration(device, ring.settle)
    publisher = InPlacePublisher(settings.directory, worker, beacon, registration=registration, limit_bytes=limit)
    if publisher.pinned is None:
        log.warning("%s has no effect: the kernel grants no leases, so no dump file is used again", PINNED_DUMP_BYTES)
    else:
        ring.land_in(publisher.pinned)
    return publisher


def write_refusal(settings: PluginSettings, port: int, dp_rank: int, sglang_version: str, reason: str) -> int:
    """Leave `refused.json` where the beacon would be; the lock lasts until the returned descriptor is closed.

    Raises:
        TapError, OSError, ValueError: the directory cannot be used either.
    """
    worker = settings.directory / worker_name(settings, port)
    for directory in (settings.directory, worker):
        ensure_private_directory(directory)
    tap = worker / tap_name(required_boot_id(settings), dp_rank)
    lock = lock_tap(tap)
    Refusal(reason, statetap_sglang.__version__, sglang_version).write(tap)
    return lock


def required_boot_id(settings: PluginSettings) -> str:
    """The boot's id, which whoever started the server's first process has made."""
    if settings.boot_id is None:
        raise ValueError("this boot has no id; the plugin was not registered in this process")
    return settings.boot_id


def _final_norm(settings: PluginSettings, facts: ServerFacts, plan: LayerPlan, model: nn.Module) -> nn.Module | None:
    if settings.final not in ("pre_norm", "both") and not plan.has_last:
        return None
    norm = find_final_norm(model, facts.num_layers)
    if norm is None:
        raise ConfigurationRefused(
            f"{type(model).__name__} has no final norm that the plugin knows, so its pre-norm state and its last layer cannot be "
            "captured; ask for post_norm and for other layers"
        )
    return norm
