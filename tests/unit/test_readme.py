"""The README's Python runs as it stands, on a store like the one that it names."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from statetap.core.placement import Geometry

from tests.fakes.store_on_disk import hidden_arrays, random_rows, write_store

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DEMO_STORE = "var/demo/stores/demo.zarr"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example, tmp_path):
    arrays, rng = hidden_arrays("float32"), np.random.default_rng(0)
    samples = [{array.name: random_rows(array, length, rng) for array in arrays} for length in (4, 6)]
    write_store(tmp_path / "s", arrays, samples, geometry=Geometry(64, 16, 16), failed=frozenset({0}))
    assert DEMO_STORE in example
    assert example.count("\n") <= 10
    names = {}
    exec(compile(example.replace(DEMO_STORE, str(tmp_path / "s")), "README.md", "exec"), names)
    states = names["states"] if "states" in names else names["sample"].aux_hidden_states
    assert isinstance(states, torch.Tensor)
    assert torch.equal(states, torch.from_numpy(samples[1]["aux_hidden_states"]))


def test_there_are_two():
    assert len(EXAMPLES) == 2
