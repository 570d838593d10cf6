"""Where a pass's rows go: dumps in the plugin's form, or plain ones as a hand-patched server writes them.

An outlet never raises for a dump that it could not publish: a lost capture fails a request, never the server.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import statetap_sglang
import structlog
import torch
from statetap_sglang.beacon import Beacon
from statetap_sglang.checksum import source_row_checksums
from statetap_sglang.format import ROW_CHECKSUMS, TOKEN_IDS, DumpMetadata, stem
from statetap_sglang.free_files import RECYCLE_FROM_BYTES
from statetap_sglang.plain import PlainLayout, PlainPublisher
from statetap_sglang.publisher import DumpPublisher, PublishError

from statetap import __version__
from statetap.embedded.capture import as_views
from statetap.embedded.model import TappedModel
from statetap.embedded.options import WorkerOptions

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRows:
    """One sample's rows of one pass: its tokens `[prefix_len, prefix_len + len(token_ids))`. Times are monotonic nanoseconds."""

    rid: str
    token_ids: tuple[int, ...]
    prefix_len: int
    prompt_len: int
    forward_pass: int
    forward_start_ns: int
    forward_end_ns: int
    states: Mapping[str, torch.Tensor]


class Outlet(Protocol):
    """Takes rows in the order of the passes."""

    def publish(self, rows: PublishedRows) -> str | None:
        """Publish; returns what an answer may call the dump (`<boot_id>-<dp_rank>/req_<N>`), None where dumps have no names."""
        ...

    def close(self) -> None: ...


class PluginOutlet:
    """Publishes as Statetap's SGLang plugin does: a tap directory with a beacon, a dump with metadata per sample and pass."""

    def __init__(self, model: TappedModel, options: WorkerOptions) -> None:
        self._boot_id = uuid.uuid4().hex
        beacon = Beacon(
            boot_id=self._boot_id,
            dp_rank=0,
            plugin_version=statetap_sglang.__version__,
            sglang_version=embedded_version(),
            model_path=options.model_path,
            model_fingerprint=model.fingerprint,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            aux_layer_ids=model.aux_layer_ids,
            final=model.final,
            dtype=model.dtype,
            tp_size=1,
            dp_size=1,
            pid=os.getpid(),
            budget_bytes=options.budget_bytes,
            radix_cache=options.prefix_cache_tokens is not None,
            chunked_prefill_size=options.chunked_prefill_size,
            context_length=model.context_length,
            recycle_from_bytes=RECYCLE_FROM_BYTES,
        )
        self._publisher = DumpPublisher(options.dump_dir, options.name, beacon)
        self._publisher.announce()

    @property
    def directory(self) -> Path:
        return self._publisher.directory

    def publish(self, rows: PublishedRows) -> str | None:
        # First of all: from here on, whatever becomes of these rows, their bits are known.
        checksums = source_row_checksums(tensor.contiguous() for tensor in rows.states.values())
        metadata = DumpMetadata(
            boot_id=self._boot_id,
            rid=rows.rid,
            prefix_len=rows.prefix_len,
            extend_len=len(rows.token_ids),
            prompt_len=rows.prompt_len,
            forward_pass=rows.forward_pass,
            forward_start_ns=rows.forward_start_ns,
            forward_end_ns=rows.forward_end_ns,
        )
        number: int | None = None
        try:
            number = self._publisher.reserve()
            own = {TOKEN_IDS: torch.tensor(rows.token_ids, dtype=torch.int32), ROW_CHECKSUMS: checksums}
            self._publisher.publish(metadata, as_views({**own, **rows.states}), number)
        except (PublishError, OSError, ValueError) as error:
            reason = error.reason if isinstance(error, PublishError) else str(error)
            log.warning("worker.publish_failed", rid=rows.rid, reason=reason)
            self._publisher.publish_error(rows.rid, reason, number)
        return None if number is None else f"{self.directory.name}/{stem(number)}"

    def close(self) -> None:
        self._publisher.close()


class PlainOutlet:
    """Publishes `<dump root>/<worker>/req_<N>/` directories: hidden states and nothing that says whose they are."""

    def __init__(self, model: TappedModel, options: WorkerOptions) -> None:
        layout = PlainLayout.default(
            aux_layers=len(model.aux_layer_ids),
            final=model.final,
            kind=options.plain or "safetensors",
            published_by=options.plain_published_by,
        )
        options.dump_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = options.dump_dir / options.name
        self._publisher = PlainPublisher(self.directory, layout)

    def publish(self, rows: PublishedRows) -> None:
        """Nothing names these dumps."""
        try:
            self._publisher.publish(as_views(rows.states))
        except (OSError, ValueError) as error:
            log.warning("worker.publish_failed", rid=rows.rid, reason=str(error))

    def close(self) -> None:
        pass


def open_outlet(model: TappedModel, options: WorkerOptions) -> PluginOutlet | PlainOutlet:
    return PlainOutlet(model, options) if options.plain else PluginOutlet(model, options)


def embedded_version() -> str:
    """What the worker gives as its version, so that nobody takes it for an SGLang."""
    return f"embedded-{__version__}"
