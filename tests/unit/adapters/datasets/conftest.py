from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.datasets import make_tokenizer


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory) -> Path:
    """A tokenizer whose chat template has no generation marks, of a model with a vocabulary of 400."""
    return make_tokenizer(tmp_path_factory.mktemp("plain"), vocab_size=400)
