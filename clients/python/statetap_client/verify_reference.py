"""Hidden states as Hugging Face computes them: the reference that stores are compared with.

It shares no code with the service. One sample at a time, without a cache or padding, in the store's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What model families call the norm after their last decoder layer.
FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f")


class ModelUnusable(Exception):
    """The model cannot be loaded or does not fit the store; the message says why and what would."""


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """Of one sample of T tokens, each `[T, H]`: the wanted layers in Statetap's numbering, and both final states."""

    layers: dict[int, torch.Tensor]
    post_norm: torch.Tensor
    pre_norm: torch.Tensor


class ReferenceModel:
    """A Hugging Face causal language model. `model` is a directory, a GGUF file or the directory of one, or a hub name.

    Raises:
        ModelUnusable: it cannot be loaded, has too few layers, or its final norm is not found.
    """

    def __init__(self, model: str | Path, dtype: str, layer_ids: Sequence[int]) -> None:
        self._model = _load(model, getattr(torch, dtype))
        self._layer_ids = list(layer_ids)
        self.num_layers: int = self._model.config.get_text_config().num_hidden_layers
        self.vocab_size: int = self._model.get_input_embeddings().num_embeddings
        if self._layer_ids and max(self._layer_ids) >= self.num_layers:
            raise ModelUnusable(
                f"the store has layer {max(self._layer_ids)}, {model} has {self.num_layers} layers: is it the model of the store?"
            )
        self._final_norm = _final_norm(self._model, model)

    @torch.inference_mode()
    def hidden_states(self, input_ids: torch.Tensor) -> ReferenceStates:
        """Run the model over `input_ids` (`[T]`)."""
        seen: dict[str, torch.Tensor] = {}

        def remember(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            seen["pre_norm"], seen["post_norm"] = inputs[0][0].clone(), output[0].clone()

        hook = self._final_norm.register_forward_hook(remember)
        try:
            # The head's logits are not wanted, and would take more memory than all states.
            output = self._model.base_model(input_ids=input_ids.long()[None], output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        # hidden_states[0] is the embedding; the last one is after the final norm in most models, so it is not used.
        last = self.num_layers - 1
        layers = {i: seen["pre_norm"] if i == last else output.hidden_states[i + 1][0] for i in self._layer_ids}
        return ReferenceStates(layers, seen["post_norm"], seen["pre_norm"])


def _load(model: str | Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    path = Path(model)
    source, options = str(model), dict[str, Any]()
    if path.is_file():
        source, options = str(path.parent), _gguf(path.name)
    elif path.is_dir() and not (path / "config.json").exists():
        files = sorted(found.name for found in path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelUnusable(f"{model} holds neither a config.json nor exactly one GGUF file, but {files or 'none'}")
        options = _gguf(files[0])
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, ImportError) as e:
        raise ModelUnusable(f"{model} cannot be loaded with Hugging Face: {e}") from e
    return loaded.eval()


def _gguf(name: str) -> dict[str, Any]:
    """Plain dense weights: later transformers would keep them packed, which is slow on a CPU; earlier ones know no other way."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"gguf_file": name} | ({} if config is None else {"quantization_config": config(dequantize=True)})


def _final_norm(loaded: Any, model: str | Path) -> torch.nn.Module:
    base = loaded.base_model
    for part in (base, getattr(base, "decoder", None), getattr(base, "language_model", None)):
        for name in FINAL_NORM_NAMES:
            module = getattr(part, name, None)
            if isinstance(module, torch.nn.Module):
                return module
    raise ModelUnusable(f"{model}: its final norm is not found under any of {', '.join(FINAL_NORM_NAMES)}")
