from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from statetap.embedded.model import TappedModel

from tests.fakes.models import VOCAB_SIZE, small_llama


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama() -> TappedModel:
    model = small_llama()
    return TappedModel(model, aux_layer_ids=tuple(range(4)), final="both")


@pytest.fixture
def tokens() -> Callable[[int], tuple[int, ...]]:
    """Gives random prompts of a length, the same ones in every run, each different."""
    source = random.Random(7)
    return lambda length: tuple(source.randrange(3, VOCAB_SIZE) for _ in range(length))
