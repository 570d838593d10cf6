"""A job's spec as JSON, field by field: what is on disk changes only where somebody changes it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statetap.core.placement import Geometry
from statetap.core.records import JobSpec
from statetap.core.spec import CaptureSpec, Compression, Final, Identity, ModelFacts


def encode_spec(spec: JobSpec) -> dict[str, Any]:
    return {
        "dataset": spec.dataset,
        "store": spec.store,
        "capture": {"aux_layer_ids": list(spec.capture.aux_layer_ids), "final": spec.capture.final.value},
        "model": {
            "model_path": spec.model.model_path,
            "model_fingerprint": spec.model.model_fingerprint,
            "num_layers": spec.model.num_layers,
            "hidden_size": spec.model.hidden_size,
            "vocab_size": spec.model.vocab_size,
            "dtype": spec.model.dtype,
        },
        "identity": spec.identity.value,
        "geometry": {
            "rows_per_shard": spec.geometry.rows_per_shard,
            "rows_per_chunk": spec.geometry.rows_per_chunk,
            "alignment": spec.geometry.alignment,
        },
        "order": spec.order,
        "seed": spec.seed,
        "on_over_long": spec.on_over_long,
        "first_row": spec.first_row,
        "first_sample": spec.first_sample,
        "compression": spec.compression.value,
    }


def decode_spec(data: Mapping[str, Any]) -> JobSpec:
    """The inverse of `encode_spec`.

    Raises:
        KeyError, ValueError: `data` is not what `encode_spec` wrote.
    """
    capture, model, geometry = data["capture"], data["model"], data["geometry"]
    return JobSpec(
        dataset=data["dataset"],
        store=data["store"],
        capture=CaptureSpec(tuple(capture["aux_layer_ids"]), Final(capture["final"])),
        model=ModelFacts(
            model_path=model["model_path"],
            model_fingerprint=model["model_fingerprint"],
            num_layers=model["num_layers"],
            hidden_size=model["hidden_size"],
            vocab_size=model["vocab_size"],
            dtype=model["dtype"],
        ),
        identity=Identity(data["identity"]),
        geometry=Geometry(geometry["rows_per_shard"], geometry["rows_per_chunk"], geometry["alignment"]),
        order=data["order"],
        seed=data["seed"],
        on_over_long=data["on_over_long"],
        first_row=data["first_row"],
        first_sample=data["first_sample"],
        # Jobs from before there was any have none.
        compression=Compression(data.get("compression", Compression.NONE)),
    )
