from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang.model_fingerprint import model_fingerprint

CONFIG: dict[str, Any] = {"hidden_size": 8, "rope": {"theta": 1e4}, "_name_or_path": "here", "transformers_version": "5.0"}
SERVED = {"quantization": None, "kv_cache_dtype": "torch.bfloat16"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def fingerprint(checkpoint: Path | None, config: Mapping[str, Any] = CONFIG, served: Mapping[str, Any] = SERVED) -> str:
    return model_fingerprint(config, served, checkpoint)


def test_equal_wherever_the_model_lies(checkpoint: Path) -> None:
    here = fingerprint(checkpoint)
    (checkpoint / "README.md").write_text("about")
    elsewhere = checkpoint.rename(checkpoint.with_name("moved"))
    assert fingerprint(elsewhere, CONFIG | {"_name_or_path": "there", "transformers_version": "6.0"}) == here
    assert len(here) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"config": CONFIG | {"hidden_size": 16}},
        {"config": CONFIG | {"rope": {"theta": 1e5}}},
        {"served": SERVED | {"quantization": "fp8"}},
        {"served": SERVED | {"kv_cache_dtype": "torch.float8_e5m2"}},
        {"checkpoint": None},
    ],
)
def test_another_model_differs(checkpoint: Path, changes: dict[str, Any]) -> None:
    assert fingerprint(**({"checkpoint": checkpoint} | changes)) != fingerprint(checkpoint)


def test_weights_that_were_trained_further_differ(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    file = checkpoint / "model.safetensors"
    file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
    assert fingerprint(checkpoint) != before
    assert fingerprint(file) == fingerprint(checkpoint)


def test_what_a_config_holds_beyond_json_is_named_without_its_address(checkpoint: Path) -> None:
    assert fingerprint(checkpoint, CONFIG | {"odd": object()}) == fingerprint(checkpoint, CONFIG | {"odd": object()})
