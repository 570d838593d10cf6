"""Values read from dumps, and how far two readings are apart."""

import ml_dtypes
import numpy as np
import pytest
from statetap.core.spec import CaptureSpec, Final, ModelFacts
from statetap.runtime.doctor.states import ROUNDING, relative_error, relative_errors, rounding, states_of, told


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_those_of_the_dump_by_the_names_of_its_layers(dtype):
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    random = np.random.default_rng(0)
    aux = random.standard_normal((5, 2, 8)).astype(kind)
    post, pre = (random.standard_normal((5, 8)).astype(kind) for _ in range(2))
    parts = [
        {
            name: memoryview(np.ascontiguousarray(values[rows]).view(np.uint8)).cast("B")
            for name, values in {
                "aux_hidden_states": aux,
                "last_hidden_states": post,
                "last_hidden_states_prenorm": pre,
            }.items()
        }
        for rows in (slice(0, 3), slice(3, 5))
    ]
    states = states_of(parts, CaptureSpec((1, 4), Final.BOTH), ModelFacts("m", "f", 8, 8, 100, dtype))
    wanted = {"layer 1": aux[:, 0], "layer 4": aux[:, 1], "post_norm": post, "pre_norm": pre}
    assert states.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (states[name] == values.astype(np.float32)).all(), name


def test_the_error_is_relative_to_the_reference():
    reference = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    assert relative_error(reference, reference) == 0
    assert relative_error(reference * 1.001, reference) == pytest.approx(0.001, rel=1e-3)
    assert relative_error(reference[:5], reference) == np.inf


def test_a_massive_activation_does_not_hide_the_other_rows():
    reference = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    reference[0, 3] = 1e6
    other = reference.copy()
    other[1:] *= -1
    assert relative_error(other, reference) == pytest.approx(2, rel=1e-3)


def test_only_what_both_have_is_compared_and_the_coarser_dtype_counts():
    ones = np.ones((2, 4), np.float32)
    errors = relative_errors({"layer 1": ones, "post_norm": ones}, {"layer 2": ones, "post_norm": ones * 2})
    assert errors == {"post_norm": 0.5}
    assert told({"layer 1": 0.0, "post_norm": 0.5}) == "layer 1 0, post_norm 5.0e-01"
    many = {f"layer {index}": index / 10 for index in range(9)}
    assert told(many) == "at most 8.0e-01 (layer 8) over 9 states"
    assert rounding("float32", "bfloat16") == ROUNDING["bfloat16"]
