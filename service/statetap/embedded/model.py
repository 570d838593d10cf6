"""Loads a Hugging Face causal LM and runs one sample's part of a forward pass.

A pass runs each sample alone, with a cache of its own, so a row's bits do not depend on what shares the pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from statetap_sglang.format import MODEL_DTYPES
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from statetap.embedded.capture import StateTap, UnsupportedModel, eagle3_layers, find_decoder
from statetap.embedded.fingerprint import fingerprint
from statetap.embedded.options import Final, WorkerOptions

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The token that the model answers at temperature 0, and the captured states by dump name, one row a token."""

    next_token: int
    states: dict[str, torch.Tensor]


class TappedModel:
    """A causal LM with its states tapped. `cache` arguments are grown in place. Not for two threads."""

    def __init__(
        self,
        model: Any,
        *,
        aux_layer_ids: tuple[int, ...] | None,
        final: Final,
        tokenizer: Any = None,
        context_length: int | None = None,
    ) -> None:
        decoder = find_decoder(model)
        limit = getattr(model.config, "max_position_embeddings", None) or context_length
        if limit is None:
            raise UnsupportedModel("the model's config does not say how long its context is: give a context length")
        if context_length is not None and not 1 <= context_length <= limit:
            raise UnsupportedModel(f"a context of {context_length} tokens does not fit the model: it was made for 1 to {limit}")
        self.tokenizer = tokenizer
        self.num_layers = len(decoder.layers)
        self.hidden_size = int(model.config.hidden_size)
        self.vocab_size = int(model.config.vocab_size)
        self.context_length = int(context_length or limit)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.aux_layer_ids = eagle3_layers(self.num_layers) if aux_layer_ids is None else aux_layer_ids
        self.final = final
        self.eos_token_ids = _eos_token_ids(model)
        self.fingerprint = fingerprint(model.config.to_dict(), model.state_dict())
        if self.dtype not in MODEL_DTYPES:
            raise UnsupportedModel(
                f"the model runs in {self.dtype}, which dumps cannot carry; choose one of {', '.join(MODEL_DTYPES)}"
            )
        self._model = model.eval()
        self._tap = StateTap(decoder, self.aux_layer_ids, final)
        # Logits of every row of a long prompt are the largest tensor of a small model, and only the last row is wanted.
        accepts = inspect.signature(model.forward).parameters
        self._last_row_only: dict[str, int] = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
        # The cache's argument was renamed in transformers 5.
        self._cache_argument = "cache" if "cache" in accepts else "past_key_values"

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], cache: DynamicCache, *, capture: bool = True) -> PassOutput:
        """Run one sample's tokens on top of what its cache holds.

        Raises:
            IndexError: a token id outside the vocabulary (on a GPU: a RuntimeError that leaves the device unusable).
        """
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._model.device)
        output = self._model(input_ids=ids, use_cache=True, **{self._cache_argument: cache}, **self._last_row_only)
        next_token = int(output.logits[0, -1].argmax())
        if capture:
            return PassOutput(next_token, self._tap.take())
        self._tap.drop()
        return PassOutput(next_token, {})


def load(options: WorkerOptions) -> TappedModel:
    """Load what `options.model_path` names: a Hugging Face directory, a `.gguf` file or a directory with one, or a hub name.

    Raises:
        UnsupportedModel: there is no such model, or it cannot be tapped.
    """
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source, gguf = _locate(options.model_path)
    dtype: Any = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    if gguf and dtype == "auto":
        dtype = torch.float32  # a GGUF's own types are quantised ones
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **gguf)
        tokenizer = None if options.skip_tokenizer_init else _load_tokenizer(source, gguf)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModel(f"cannot load the model {options.model_path}: {error}") from error
    return TappedModel(
        model.to(device),
        aux_layer_ids=options.aux_layer_ids,
        final=options.final,
        tokenizer=tokenizer,
        context_length=options.context_length,
    )


def _locate(model_path: str) -> tuple[str, dict[str, str]]:
    """What to hand to `from_pretrained`, and `gguf_file` where the weights are in one."""
    path = Path(model_path)
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise UnsupportedModel(
                f"{path} holds neither a config.json nor a single .gguf file, so it is not a model's directory"
            )
        return str(path), {"gguf_file": found[0].name}
    if not path.exists() and (path.is_absolute() or model_path.startswith(".")):
        raise UnsupportedModel(f"there is no model at {path}")
    return model_path, {}


def _load_tokenizer(source: str, gguf: dict[str, str]) -> Any:
    path = Path(source)
    if path.is_dir() and not gguf and not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(source, **gguf)


def _eos_token_ids(model: Any) -> frozenset[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])
