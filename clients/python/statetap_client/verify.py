"""Proves a store: its bytes are the ones that were written, and they are the model's hidden states.

`verify_digests` hashes the stored bytes again. `verify_against_model` computes hidden states with Hugging Face, one sample at a
time, and compares them array by array and layer by layer. Both give a report and never stop at the first fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from statetap_client import layout
from statetap_client.reader import Sample, StoreReader, StoreReadError

if TYPE_CHECKING:
    import torch

    from statetap_client.verify_reference import ReferenceModel

# Relative Frobenius error that is rounding, by dtype; chunked prefill sums attention in another order.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
CHUNKED_TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-2}

Progress = Callable[[int, int], None]
"""Called with (samples done, samples to do) after every sample."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One sample's fault. `array` names what was compared (empty: the whole sample); `error`, `tolerance` where measured."""

    index: int
    id: str
    array: str
    reason: str
    error: float | None = None
    tolerance: float | None = None

    def __str__(self) -> str:
        where = f"{self.array}: " if self.array else ""
        return f"sample {self.index} (id {self.id!r}): {where}{self.reason}"


@dataclass(slots=True)
class Report:
    """What was verified. `max_error` is the largest relative error of each array, or of each captured layer of it."""

    stored: int
    """Stored samples that the store has."""
    checked: int = 0
    max_error: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Something was checked, and nothing was wrong."""
        return self.checked > 0 and not self.failures


def verify_digests(store: StoreReader, samples: int | None = None, *, seed: int = 0, progress: Progress | None = None) -> Report:
    """Read stored samples' bytes and compare their XXH3-64 with `samples/digest`.

    `samples` is how many to draw by `seed`; None is all of them.
    """
    report = Report(len(store.stored))
    chosen = choose(store, samples, seed)
    for index in chosen:
        try:
            digest, recorded = store.digest(index), store.recorded_digest(index)
        except StoreReadError as e:
            report.failures.append(Failure(index, store.ids[index], "", str(e)))
        else:
            if digest != recorded:
                reason = f"digest {digest:016x} of the bytes, {recorded:016x} was recorded"
                report.failures.append(Failure(index, store.ids[index], "", reason))
        report.checked += 1
        if progress is not None:
            progress(report.checked, len(chosen))
    return report


def verify_against_model(
    store: StoreReader,
    model: str | Path,
    *,
    samples: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    chunked: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Recompute stored samples with the Hugging Face model and compare every captured layer and final state.

    `model` is a directory, a GGUF file (or the directory of one) or a hub name, loaded in the store's dtype. `samples` is as in
    `verify_digests`. The error is the Frobenius norm of the difference over that of the reference, taken in float64. Without a
    `tolerance` it is the dtype's: 1e-5 for float32, else 1e-2, or 5e-2 where the worker prefilled in chunks (`chunked`).

    Raises:
        ModelUnusable: the model cannot be loaded, or does not fit the store.
    """
    from statetap_client.verify_reference import ReferenceModel

    if tolerance is None:
        tolerance = (CHUNKED_TOLERANCES if chunked else TOLERANCES)[store.dtype]
    report = Report(len(store.stored))
    chosen = choose(store, samples, seed)
    if not chosen:
        return report
    reference = ReferenceModel(model, store.dtype, store.attributes["aux_layer_ids"])
    for index in chosen:
        try:
            _compare(report, store.sample(index), reference, store.attributes["aux_layer_ids"], tolerance)
        except StoreReadError as e:
            report.failures.append(Failure(index, store.ids[index], "", str(e)))
        report.checked += 1
        if progress is not None:
            progress(report.checked, len(chosen))
    return report


def choose(store: StoreReader, samples: int | None, seed: int) -> list[int]:
    """Indexes of stored samples, ascending: all of them, or as many as asked for, drawn by `seed`."""
    stored: list[int] = store.stored.tolist()
    if samples is None or samples >= len(stored):
        return stored
    return sorted(random.Random(seed).sample(stored, samples))


def _compare(
    report: Report, sample: Sample[torch.Tensor], reference: ReferenceModel, layers: list[int], tolerance: float
) -> None:
    wrong_ids = sample.input_ids[(sample.input_ids < 0) | (sample.input_ids >= reference.vocab_size)].tolist()
    if wrong_ids:
        reason = f"token id {wrong_ids[0]} is outside of the model's vocabulary of {reference.vocab_size}"
        report.failures.append(Failure(sample.index, sample.id, layout.INPUT_IDS, reason))
        return
    states = reference.hidden_states(sample.input_ids)
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    if sample.aux_hidden_states is not None:
        for slot, layer in enumerate(layers):
            name = f"{layout.AUX_HIDDEN_STATES}[layer {layer}]"
            pairs.append((name, sample.aux_hidden_states[:, slot], states.layers[layer]))
    if sample.last_hidden_states is not None:
        pairs.append((layout.LAST_HIDDEN_STATES, sample.last_hidden_states, states.post_norm))
    if sample.last_hidden_states_prenorm is not None:
        pairs.append((layout.LAST_HIDDEN_STATES_PRENORM, sample.last_hidden_states_prenorm, states.pre_norm))
    for name, stored, wanted in pairs:
        if stored.shape != wanted.shape:
            reason = f"the store has shape {tuple(stored.shape)}, the model gives {tuple(wanted.shape)}"
            report.failures.append(Failure(sample.index, sample.id, name, reason))
            continue
        error = relative_error(stored, wanted)
        report.max_error[name] = max(report.max_error.get(name, 0.0), error)
        # Written so that NaN is a failure.
        if not error <= tolerance:
            reason = f"relative error {error:.3g} exceeds {tolerance:.3g}"
            report.failures.append(Failure(sample.index, sample.id, name, reason, error, tolerance))


def relative_error(stored: torch.Tensor, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `wanted`, in float64; infinite where a value is not finite."""
    stored, wanted = stored.double(), wanted.double()
    if not stored.isfinite().all():
        return float("inf")
    norm = float(wanted.norm())
    difference = float((stored - wanted).norm())
    return difference / norm if norm else (0.0 if not difference else float("inf"))
