"""Checks at the source: what a pass gave must be what was declared, or its captures are lost with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# How far the norm of the pre-norm state may be from the post-norm state: they are the same sum rounded at different places.
# A state of another row or pass is off by about 1.
_NORM_TOLERANCE = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}


class CaptureFailed(RuntimeError):
    """Captures of a pass that are lost; the message is the reason that the service gets."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """What every state of a tap is: its width and its dtype, as torch names it without the prefix."""

    hidden_size: int
    dtype: str


def check_state(what: str, state: torch.Tensor, shape: StateShape, *, rows: int, padded: bool) -> None:
    """CaptureFailed unless `state` is `[rows, hidden_size]` in the declared dtype; padding may follow where a pass is padded."""
    if state.dim() != 2 or state.shape[1] != shape.hidden_size:
        raise CaptureFailed(f"{what} has shape {tuple(state.shape)}, its rows must be {shape.hidden_size} wide")
    found = str(state.dtype).removeprefix("torch.")
    if found != shape.dtype:
        raise CaptureFailed(f"{what} is {found}, the tap declared {shape.dtype}")
    if state.shape[0] < rows or (state.shape[0] > rows and not padded):
        raise CaptureFailed(f"{what} has {state.shape[0]} rows, the pass's requests have {rows}")


def check_same_rows(rows: Mapping[str, int]) -> None:
    """CaptureFailed unless all states of the pass, by name, have one number of rows."""
    if len(set(rows.values())) > 1:
        raise CaptureFailed(f"the states of one pass have different numbers of rows: {dict(rows)}")


def split_aux(
    aux: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...] | None, layers: int, shape: StateShape
) -> tuple[torch.Tensor, ...]:
    """The model's captured layers as `layers` tensors `[rows, hidden_size]`; models give a list, or one packed tensor.

    Raises:
        CaptureFailed: not so many layers, or a packed tensor of another width.
    """
    if aux is None:
        raise CaptureFailed(f"the model captured no layers, {layers} were asked for")
    if isinstance(aux, list | tuple):
        if len(aux) != layers:
            raise CaptureFailed(f"the model captured {len(aux)} layers, {layers} were asked for")
        return tuple(aux)
    if aux.dim() != 2 or aux.shape[1] != layers * shape.hidden_size:
        raise CaptureFailed(
            f"the captured layers have shape {tuple(aux.shape)}, rows of {layers} layers are {layers * shape.hidden_size} wide"
        )
    width = shape.hidden_size
    return tuple(aux[:, i * width : (i + 1) * width] for i in range(layers))


def check_norm(normed: torch.Tensor, post: torch.Tensor, dtype: str) -> None:
    """CaptureFailed unless `normed`, the norm of sampled pre-norm rows, is their post-norm state; both `[S, hidden_size]`."""
    difference = (normed.double() - post.double()).norm(dim=1)
    size = post.double().norm(dim=1)
    # Not `>`: a NaN must not pass here.
    agreed = difference <= _NORM_TOLERANCE[dtype] * size
    if not bool(agreed.all()):
        worst = float((difference / size).nan_to_num(nan=float("inf")).max())
        raise CaptureFailed(
            f"the norm of the pre-norm state is not the post-norm state of the same pass (relative difference {worst:.2g}); "
            "this model's final state cannot be captured before its norm"
        )
