"""Taps the residual stream of a Hugging Face decoder with forward hooks.

Layer ids are Statetap's: `L_i` is the residual stream after 0-based decoder layer `i`, which is what that layer's module
returns. The final norm's module gives both final states: its input is `pre_norm`, its output `post_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from statetap_sglang.format import AUX_HIDDEN_STATES, LAST_HIDDEN_STATES, LAST_HIDDEN_STATES_PRENORM, MODEL_DTYPES, TensorView
from torch import nn

from statetap.embedded.options import Final

# Where the supported families keep their decoder: (layers, final norm), as paths from the causal LM.
_STRUCTURES = (
    ("model.layers", "model.norm"),
    ("transformer.h", "transformer.ln_f"),
    ("gpt_neox.layers", "gpt_neox.final_layer_norm"),
)


# safetensors' names for what a dump holds besides hidden states: token ids and checksums.
_INTEGERS = {torch.int32: "I32", torch.int64: "I64"}


class UnsupportedModel(ValueError):
    """A model that this worker cannot load or tap; the message says why and what it can."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a causal LM that are tapped."""

    layers: nn.ModuleList
    final_norm: nn.Module


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder layers and the final norm of a Llama-like, GPT-2-like or GPT-NeoX model.

    Raises:
        UnsupportedModel: it is built in another way.
    """
    for layers_path, norm_path in _STRUCTURES:
        layers, norm = _descend(model, layers_path), _descend(model, norm_path)
        if isinstance(layers, nn.ModuleList) and norm is not None:
            return Decoder(layers, norm)
    known = ", ".join(f"{layers} with {norm}" for layers, norm in _STRUCTURES)
    raise UnsupportedModel(f"{type(model).__name__} has no decoder where this worker looks for one ({known}); use SGLang for it")


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's layers 1, n//2-1, n-4, those of them that a small model has."""
    return tuple(sorted({i for i in (1, num_layers // 2 - 1, num_layers - 4) if 0 <= i < num_layers}))


@dataclass(slots=True)
class StateTap:
    """Holds the states of the latest forward pass of one model until `take` collects them. Not for two threads."""

    decoder: Decoder
    aux_layer_ids: tuple[int, ...]
    final: Final
    _layers: dict[int, torch.Tensor] = field(default_factory=dict)
    _norm: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.decoder.layers)
        wrong = [i for i in self.aux_layer_ids if not 0 <= i < n]
        if wrong or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise UnsupportedModel(f"layers {list(self.aux_layer_ids)} must be distinct, ascending and within 0..{n - 1}")
        for i in self.aux_layer_ids:
            self.decoder.layers[i].register_forward_hook(self._layer_hook(i))
        self.decoder.final_norm.register_forward_hook(self._norm_hook)

    def take(self) -> dict[str, torch.Tensor]:
        """The states of the pass just run, by their names in the dump format: `[T, K, H]` and `[T, H]`, rows first."""
        tensors: dict[str, torch.Tensor] = {}
        if self.aux_layer_ids:
            tensors[AUX_HIDDEN_STATES] = torch.stack([self._layers[i] for i in self.aux_layer_ids], dim=1)
        if self.final in ("post_norm", "both"):
            tensors[LAST_HIDDEN_STATES] = self._norm["post"]
        if self.final in ("pre_norm", "both"):
            tensors[LAST_HIDDEN_STATES_PRENORM] = self._norm["pre"]
        self.drop()
        return tensors

    def drop(self) -> None:
        self._layers.clear()
        self._norm.clear()

    def _layer_hook(self, layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            # A layer returns the residual stream, alone or first in a tuple, by the version of transformers.
            self._layers[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def _norm_hook(self, _module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._norm["pre"] = args[0][0]
        self._norm["post"] = output[0]


def as_view(tensor: torch.Tensor) -> TensorView:
    """A tensor's bytes, for a publisher. Copies only if it is on a device or not contiguous.

    Raises:
        KeyError: a dtype that the dump format has not.
    """
    host = tensor.detach().cpu().contiguous()
    dtype = _INTEGERS.get(host.dtype) or MODEL_DTYPES[str(host.dtype).removeprefix("torch.")]
    # numpy has no bfloat16, so the bytes go over as bytes.
    return TensorView(dtype, tuple(host.shape), host.view(torch.uint8).numpy().data.cast("B"))


def as_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorView]:
    return {name: as_view(tensor) for name, tensor in tensors.items()}


def _descend(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None
