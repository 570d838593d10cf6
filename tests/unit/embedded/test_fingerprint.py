from __future__ import annotations

from pathlib import Path

import torch
from statetap.embedded.fingerprint import fingerprint
from statetap.embedded.model import load
from statetap.embedded.options import Dtype, WorkerOptions

from tests.fakes.models import save_model, small_llama


def loaded(directory: Path, dtype: Dtype = "auto") -> str:
    return load(WorkerOptions(model_path=str(directory), dump_dir=directory, dtype=dtype)).fingerprint


def test_a_directory_has_one_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    first, moved = save_model(small_llama(), tmp_path / "a"), save_model(small_llama(), tmp_path / "b")
    assert loaded(first) == loaded(first) == loaded(moved)


def test_other_weights_of_the_same_shape_differ(tmp_path: Path) -> None:
    assert loaded(save_model(small_llama(0), tmp_path / "a")) != loaded(save_model(small_llama(1), tmp_path / "b"))


def test_another_dtype_differs(tmp_path: Path) -> None:
    directory = save_model(small_llama(), tmp_path / "model")
    assert loaded(directory) == loaded(directory, "float32") != loaded(directory, "bfloat16")


def test_every_tensor_counts_and_so_does_the_config() -> None:
    weights = {"a": torch.ones(8), "b": torch.ones(500, 500)}
    base = fingerprint({"rope_theta": 1}, weights)
    assert fingerprint({"rope_theta": 2}, weights) != base
    assert fingerprint({"rope_theta": 1, "_name_or_path": "elsewhere"}, weights) == base
    assert fingerprint({"rope_theta": 1}, weights | {"b": torch.ones(500, 500) * 1.01}) != base
    assert fingerprint({"rope_theta": 1}, weights | {"b": torch.ones(250, 1000)}) != base
    assert fingerprint({"rope_theta": 1}, {"a": weights["a"], "c": weights["b"]}) != base
    small = weights["a"].clone()
    small[5] = 0
    assert fingerprint({"rope_theta": 1}, weights | {"a": small}) != base


def test_a_column_of_a_matrix_counts() -> None:
    matrix = torch.ones(512, 512)
    base = fingerprint({}, {"w": matrix.clone()})
    for column in (0, 1, 255, 511):
        changed = matrix.clone()
        changed[:, column] = 2
        assert fingerprint({}, {"w": changed}) != base, column
