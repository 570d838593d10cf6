"""core/spec.py: which arrays a capture spec fills, and how wide they are."""

import pytest
from statetap.core.spec import CaptureSpec, Final, HiddenArray, ModelFacts, eagle3_layers, preset

MODEL = ModelFacts(model_path="m", model_fingerprint="f", num_layers=30, hidden_size=576, vocab_size=49152, dtype="bfloat16")


def test_both_final_states_come_after_the_layers_in_the_store_order():
    arrays = CaptureSpec((1, 14, 26), Final.BOTH).hidden_arrays(MODEL)
    assert arrays == (
        HiddenArray("aux_hidden_states", (3, 576), "bfloat16"),
        HiddenArray("last_hidden_states", (576,), "bfloat16"),
        HiddenArray("last_hidden_states_prenorm", (576,), "bfloat16"),
    )


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (CaptureSpec((), Final.POST_NORM), ["last_hidden_states"]),
        (CaptureSpec((), Final.PRE_NORM), ["last_hidden_states_prenorm"]),
        (CaptureSpec((0, 29), Final.NONE), ["aux_hidden_states"]),
    ],
)
def test_an_array_that_the_spec_does_not_name_is_absent(spec, names):
    assert [array.name for array in spec.hidden_arrays(MODEL)] == names


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_row_bytes_follow_the_models_dtype(dtype, item_bytes):
    model = ModelFacts(model_path="m", model_fingerprint="f", num_layers=30, hidden_size=576, vocab_size=49152, dtype=dtype)
    assert CaptureSpec((1, 14, 26), Final.BOTH).row_bytes(model) == 5 * 576 * item_bytes


def test_a_spec_that_captures_nothing_is_refused():
    with pytest.raises(ValueError, match="must name a layer or a final state"):
        CaptureSpec((), Final.NONE)


@pytest.mark.parametrize("layers", [(-1, 2), (2, 1), (1, 1)])
def test_layers_out_of_order_repeated_or_negative_are_refused(layers):
    with pytest.raises(ValueError, match="ascending, distinct and at least 0"):
        CaptureSpec(layers, Final.POST_NORM)


def test_eagle3_layers_are_those_of_the_contract():
    assert eagle3_layers(30) == (1, 14, 26)
    assert eagle3_layers(36) == (1, 17, 32)
    # n//2-1 and n-4 may fall on layer 1, which is then captured once.
    assert eagle3_layers(5) == (1,)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("eagle3", CaptureSpec((1, 14, 26), Final.POST_NORM)),
        ("speculators", CaptureSpec((1, 14, 26), Final.PRE_NORM)),
        ("all-trainers", CaptureSpec((1, 14, 26), Final.BOTH)),
        ("mtp", CaptureSpec((), Final.POST_NORM)),
    ],
)
def test_presets_are_those_of_the_contract(name, spec):
    assert preset(name, 30) == spec


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown preset 'eagle4'; known: eagle3, speculators"):
        preset("eagle4", 30)
