from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statetap_sglang.checksum import differing_rows, row_checksums, source_row_checksums, word_bytes
from statetap_sglang.format import HIDDEN_TENSORS, ITEM_BYTES, TensorView

from tests.fakes.dumps import make_beacon, make_tensors, random_tensor

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def by_hand(tensors: Mapping[str, TensorView]) -> list[int]:
    """The definition, word by word."""
    names = [name for name in HIDDEN_TENSORS if name in tensors]
    sums = []
    for row in range(tensors[names[0]].rows):
        total = 0
        for name in names:
            tensor = tensors[name]
            width = word_bytes(tensor.shape[-1] * ITEM_BYTES[tensor.dtype])
            length = tensor.nbytes // tensor.rows
            raw = bytes(tensor.data)[row * length : (row + 1) * length]
            total += sum(int.from_bytes(raw[i : i + width], "little", signed=True) for i in range(0, length, width))
        sums.append((total + (1 << 63)) % (1 << 64) - (1 << 63))
    return sums


def as_torch(view: TensorView) -> torch.Tensor:
    return torch.frombuffer(bytearray(view.data), dtype=TORCH[view.dtype]).reshape(view.shape)


@given(
    dtype=st.sampled_from(sorted(TORCH)),
    rows=st.integers(1, 6),
    layers=st.integers(1, 3),
    width=st.integers(1, 20),
    seed=st.integers(0, 1 << 32),
)
def test_source_reader_and_definition_agree(dtype: str, rows: int, layers: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {
        "aux_hidden_states": random_tensor(rng, dtype, (rows, layers, width)),
        "last_hidden_states": random_tensor(rng, dtype, (rows, width)),
    }
    expected = by_hand(tensors)
    assert row_checksums(tensors).tolist() == expected
    assert source_row_checksums(as_torch(view) for view in tensors.values()).tolist() == expected


@pytest.mark.parametrize(("nbytes", "width"), [(2, 2), (4, 4), (6, 2), (8, 8), (12, 4), (1152, 8)])
def test_words_are_as_wide_as_a_row_allows(nbytes: int, width: int) -> None:
    assert word_bytes(nbytes) == width


def test_a_row_of_odd_length_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        word_bytes(7)


def test_the_sum_wraps_and_does_not_overflow() -> None:
    most = TensorView("F32", (1, 4), np.full(2, (1 << 63) - 1, np.int64).data.cast("B"))
    assert row_checksums({"last_hidden_states": most}).tolist() == [-2]
    assert source_row_checksums([as_torch(most)]).tolist() == [-2]


def test_a_changed_and_a_swapped_row_are_found() -> None:
    tensors = make_tensors(make_beacon(), 5)
    tensors["row_checksums"] = TensorView("I64", (5,), row_checksums(tensors).data.cast("B"))
    assert differing_rows(tensors) == []
    last = tensors["last_hidden_states"]
    raw = bytearray(last.data)
    raw[2 * 96] ^= 1
    assert differing_rows(tensors | {"last_hidden_states": TensorView(last.dtype, last.shape, memoryview(raw))}) == [2]
    raw = bytearray(last.data)
    raw[0:96], raw[96:192] = raw[96:192], raw[0:96]
    assert differing_rows(tensors | {"last_hidden_states": TensorView(last.dtype, last.shape, memoryview(raw))}) == [0, 1]


def test_what_has_no_hidden_states_has_no_checksums() -> None:
    with pytest.raises(ValueError, match="no hidden states"):
        row_checksums({"token_ids": TensorView("I32", (0,), memoryview(b""))})
    with pytest.raises(ValueError, match="no hidden states"):
        source_row_checksums([])
