"""Which layers a model captures: asked of its setter, and read back from the model, whatever the setter made of the ids.

Layer ids are Statetap's: `i` is the residual stream after 0-based decoder layer `i`. SGLang's models hold in `layers_to_capture`
the layers whose *input* they capture, so layer `i` must stand there as `i + 1`. The last layer is the input of none; its output
is the final state before the norm, and is taken there.

Knows models by what they look like, and nothing of SGLang itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# In this order. EAGLE3's setters differ by model (some add 1 only to certain ids); DFLASH's name layer outputs.
SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")
_FINAL_NORMS = ("norm", "norm_f", "final_norm", "final_layernorm", "ln_f", "embedding_norm")
# Some models look for this mark on each layer, and their setters never take it away.
_MARK = "_is_layer_to_capture"


class LayersRefused(RuntimeError):
    """A model that cannot be made to capture what was asked: the message says what it would capture, and the way out."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The layers to capture of a model with `num_layers`, and where each comes from."""

    num_layers: int
    aux_layer_ids: tuple[int, ...]

    @property
    def from_setter(self) -> tuple[int, ...]:
        """The layers that the model captures itself."""
        return tuple(layer for layer in self.aux_layer_ids if layer < self.num_layers - 1)

    @property
    def has_last(self) -> bool:
        """Whether the last layer is among them: it stands last, and is the final state before the norm."""
        return self.num_layers - 1 in self.aux_layer_ids


def plan_layers(choice: str | tuple[int, ...], num_layers: int) -> LayerPlan:
    """Resolve a preset (`eagle3`, `all`, `none`) or check ids.

    Raises:
        LayersRefused: the model has no such layer.
    """
    if choice == "eagle3":
        ids = tuple(sorted({i for i in (1, num_layers // 2 - 1, num_layers - 4) if 0 <= i < num_layers}))
    elif choice == "all":
        ids = tuple(range(num_layers))
    elif choice == "none":
        ids = ()
    else:
        ids = tuple(int(layer) for layer in choice)
    if ids and ids[-1] >= num_layers:
        raise LayersRefused(
            f"layer {ids[-1]} was asked for, the model has layers 0 to {num_layers - 1}; change STATETAP_PLUGIN_LAYERS"
        )
    return LayerPlan(num_layers, ids)


def capture_layers(model: nn.Module, ids: tuple[int, ...]) -> None:
    """Make the model capture the outputs of exactly these layers, none of them the last.

    Raises:
        LayersRefused: it has no setter, or its setters make something else of the ids; it is then left as it was.
    """
    if not ids:
        return
    before = {module: dict(vars(module)) for module in model.modules()}
    tried = []
    for name in SETTERS:
        setter = getattr(model, name, None)
        if setter is None:
            continue
        _unmark(model)
        try:
            setter(list(ids))
        except Exception as error:  # noqa: BLE001 (a model's own code: whatever it raises is its answer)
            tried.append(f"{name} says {type(error).__name__}: {error}")
        else:
            captured = captured_layers(model)
            if captured == ids:
                return
            tried.append(f"after {name} it captures {'nothing that can be read back' if captured is None else list(captured)}")
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
    why = "; ".join(tried) or f"it has none of {', '.join(SETTERS)}"
    raise LayersRefused(
        f"{type(model).__name__} does not capture layers {list(ids)}: {why}; ask for other layers, or for none "
        "(STATETAP_PLUGIN_LAYERS=none captures the final state alone)"
    )


def captured_layers(model: nn.Module) -> tuple[int, ...] | None:
    """The layers, in our ids, whose outputs the model will capture; None where that cannot be told."""
    holders = _holders(model)
    if len(holders) != 1:
        return None
    inputs = vars(holders[0])["layers_to_capture"]
    if not isinstance(inputs, Iterable):
        return None
    inputs = sorted(inputs) if isinstance(inputs, set | frozenset) else list(inputs)
    marks = {i: getattr(layer, _MARK) for i, layer in enumerate(_layers(holders[0])) if hasattr(layer, _MARK)}
    if marks and [i for i, mark in marks.items() if mark] != inputs:
        return None
    return tuple(layer - 1 for layer in inputs)


def find_final_norm(model: nn.Module, num_layers: int) -> nn.Module | None:
    """The norm after the last decoder layer: it stands beside the list of all layers. None where no such module is found."""
    for module in model.modules():
        if len(_layers(module)) == num_layers:
            for name in _FINAL_NORMS:
                norm: nn.Module | None = getattr(module, name, None)
                if callable(norm):
                    return norm
    return None


def _holders(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "layers_to_capture" in vars(module)]


def _layers(module: nn.Module) -> Any:
    layers = getattr(module, "layers", ())
    return layers if hasattr(layers, "__len__") else ()


def _unmark(model: nn.Module) -> None:
    for holder in _holders(model):
        for layer in _layers(holder):
            if getattr(layer, _MARK, False):
                setattr(layer, _MARK, False)
