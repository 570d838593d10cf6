"""Hugging Face's hidden states in float32, and the comparison with what a server published."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from statetap_client.verify import relative_error
from statetap_client.verify_reference import ReferenceModel, ReferenceStates

from tests.e2e.captures import States

TOLERANCE = 1e-5


@lru_cache(2)
def _model(model: Path) -> ReferenceModel:
    layers = ReferenceModel(model, "float32", []).num_layers
    return ReferenceModel(model, "float32", range(layers))


@lru_cache(256)
def _states(model: Path, prompt: tuple[int, ...]) -> ReferenceStates:
    return _model(model).hidden_states(torch.tensor(prompt))


def prompts(model: Path, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens of the model's vocabulary, special ones left out."""
    random = np.random.default_rng(seed)
    return [random.integers(3, _model(model).vocab_size, length).tolist() for length in lengths]


def assert_equal_states(model: Path, prompt: Sequence[int], states: States) -> None:
    """Every layer and both final states within `TOLERANCE` of the reference, relative in the Frobenius norm."""
    wanted = _states(model, tuple(prompt))
    aux = states["aux_hidden_states"]
    assert aux.shape[1] == len(wanted.layers)
    pairs = {f"layer {layer}": (aux[:, layer], reference) for layer, reference in wanted.layers.items()}
    pairs["post-norm"] = states["last_hidden_states"], wanted.post_norm
    pairs["pre-norm"] = states["last_hidden_states_prenorm"], wanted.pre_norm
    errors = {name: relative_error(torch.from_numpy(got), reference) for name, (got, reference) in pairs.items()}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"prompt of {len(prompt)} tokens: {wrong}"
