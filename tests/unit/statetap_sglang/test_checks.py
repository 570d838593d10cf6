from __future__ import annotations

import pytest
import torch
from statetap_sglang.checks import CaptureFailed, StateShape, check_norm, check_same_rows, check_state, split_aux

SHAPE = StateShape(8, "float32")


def test_a_state_as_declared_passes() -> None:
    check_state("it", torch.zeros(5, 8), SHAPE, rows=5, padded=False)
    check_state("it", torch.zeros(7, 8), SHAPE, rows=5, padded=True)


@pytest.mark.parametrize(
    ("state", "padded", "message"),
    [
        (torch.zeros(4, 8), False, "it has 4 rows, the pass's requests have 5"),
        (torch.zeros(4, 8), True, "it has 4 rows"),
        (torch.zeros(6, 8), False, "it has 6 rows"),
        (torch.zeros(5, 16), False, r"shape \(5, 16\), its rows must be 8 wide"),
        (torch.zeros(5, 1, 8), False, "shape"),
        (torch.zeros(5, 8, dtype=torch.bfloat16), False, "it is bfloat16, the tap declared float32"),
    ],
)
def test_a_state_that_is_not_as_declared_fails(state: torch.Tensor, padded: bool, message: str) -> None:
    with pytest.raises(CaptureFailed, match=message):
        check_state("it", state, SHAPE, rows=5, padded=padded)


def test_states_of_one_pass_have_one_number_of_rows() -> None:
    check_same_rows({"a": 5, "b": 5})
    with pytest.raises(CaptureFailed, match=r"different numbers of rows: \{'a': 5, 'b': 6\}"):
        check_same_rows({"a": 5, "b": 6})


def test_layers_come_as_a_list_or_packed() -> None:
    layers = [torch.full((5, 8), float(i)) for i in range(3)]
    for given in (layers, tuple(layers), torch.cat(layers, dim=1)):
        parts = split_aux(given, 3, SHAPE)
        assert [part.shape for part in parts] == [(5, 8)] * 3
        assert [float(part[0, 0]) for part in parts] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (None, "the model captured no layers, 3 were asked for"),
        ([torch.zeros(5, 8)] * 2, "captured 2 layers, 3 were asked for"),
        # A model that passes its state before the norm puts it in the place of the layers.
        (torch.zeros(5, 8), r"shape \(5, 8\), rows of 3 layers are 24 wide"),
    ],
)
def test_other_layers_than_asked_for_fail(aux: torch.Tensor | list[torch.Tensor] | None, message: str) -> None:
    with pytest.raises(CaptureFailed, match=message):
        split_aux(aux, 3, SHAPE)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_of_a_rounded_sum_agrees(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.randn(4, 512) * 30
    exact[:, 7] = 9000.0  # a massive activation
    check_norm(normed(exact.to(dtype)), normed(exact).to(dtype), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_norm_of_other_rows_does_not(dtype: str) -> None:
    torch.manual_seed(0)
    states = torch.randn(4, 512)
    with pytest.raises(CaptureFailed, match="is not the post-norm state of the same pass"):
        check_norm(normed(states.roll(1, 0)), normed(states), dtype)
    one_row_wrong = states.clone()
    one_row_wrong[2] = states[3]
    with pytest.raises(CaptureFailed, match="is not the post-norm state"):
        check_norm(normed(one_row_wrong), normed(states), dtype)


def test_nan_does_not_agree() -> None:
    with pytest.raises(CaptureFailed, match="relative difference inf"):
        check_norm(torch.full((1, 8), float("nan")), torch.ones(1, 8), "float32")
