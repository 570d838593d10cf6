"""Captured values as float32 arrays, one a state, and how far two readings of one prompt are apart.

Residual streams have massive activations, in a few dimensions and above all in the first row. An absolute bound fails on them,
and a relative one over the whole array sees little else, so the rows are also looked at one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from statetap.core.spec import (
    AUX_HIDDEN_STATES,
    LAST_HIDDEN_STATES,
    LAST_HIDDEN_STATES_PRENORM,
    CaptureSpec,
    Final,
    ModelFacts,
)

States = Mapping[str, NDArray[np.float32]]
"""By name, `[T, H]` each: `layer <i>`, `post_norm`, `pre_norm`."""

# The relative error that other kernels and other shapes of a batch account for.
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Beyond this nothing is a matter of rounding: other weights, another layer, another norm.
UNRELATED = 0.2
MOST_TOLD = 6

_FINALS = {LAST_HIDDEN_STATES: Final.POST_NORM, LAST_HIDDEN_STATES_PRENORM: Final.PRE_NORM}


def states_of(parts: Sequence[Mapping[str, memoryview]], capture: CaptureSpec, model: ModelFacts) -> States:
    """The values of a capture's dumps, in row order, copied out."""
    states: dict[str, NDArray[np.float32]] = {}
    for array in capture.hidden_arrays(model):
        rows = [_as_float32(part[array.name], model.dtype).reshape(-1, *array.row_shape) for part in parts]
        values = np.concatenate(rows)
        if array.name == AUX_HIDDEN_STATES:
            states |= {f"layer {layer}": values[:, slot] for slot, layer in enumerate(capture.aux_layer_ids)}
        else:
            states[str(_FINALS[array.name])] = values
    return states


def _as_float32(data: memoryview, dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        # The upper half of a float32's bits.
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype)).astype(np.float32)


def relative_errors(states: States, reference: States) -> dict[str, float]:
    """For each state that both have: the relative Frobenius error, or the median row's relative error if that is larger."""
    return {name: relative_error(states[name], reference[name]) for name in states if name in reference}


def relative_error(values: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Of `[T, H]` arrays; infinite where their shapes differ."""
    if values.shape != reference.shape:
        return float("inf")
    difference = np.linalg.norm(values.astype(np.float64) - reference, axis=1)
    size = np.linalg.norm(reference.astype(np.float64), axis=1)
    whole = np.linalg.norm(difference) / max(np.linalg.norm(size), np.finfo(np.float64).tiny)
    rows = difference / np.maximum(size, np.finfo(np.float64).tiny)
    return float(max(whole, np.median(rows)))


def rounding(*dtypes: str) -> float:
    """The bound for readings of these dtypes: that of the coarsest."""
    return max(ROUNDING[dtype] for dtype in dtypes)


def told(errors: Mapping[str, float]) -> str:
    """Such as `layer 1 3.1e-07, post_norm 0`; of many, the worst."""
    if len(errors) > MOST_TOLD:
        worst = max(errors, key=lambda name: errors[name])
        return f"at most {errors[worst]:.1e} ({worst}) over {len(errors)} states"
    return ", ".join(f"{name} {error:.1e}" if error else f"{name} 0" for name, error in errors.items())
