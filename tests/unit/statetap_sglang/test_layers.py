from __future__ import annotations

from typing import Any

import pytest
import torch
from statetap_sglang.layers import LayerPlan, LayersRefused, capture_layers, captured_layers, find_final_norm, plan_layers
from torch import nn

from tests.fakes.sglang_stub import StubModel


class MarkingModel(StubModel):
    """Marks its layers, as the Qwen-MoE family does, and never takes a mark away."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        super().set_eagle3_layers_to_capture(layer_ids)
        for layer in self.model.layers_to_capture:
            self.model.layers[layer]._is_layer_to_capture = True


class DeepSeekLike(StubModel):
    """Adds 1 only if the first id is 1; its other setter always adds 1 (SGLang's models/deepseek_v2.py)."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids] if layer_ids[0] == 1 else list(layer_ids)

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


@pytest.mark.parametrize(
    ("choice", "layers", "ids"),
    [
        ("eagle3", 30, (1, 14, 26)),
        ("eagle3", 61, (1, 29, 57)),
        ("eagle3", 4, (0, 1)),
        ("eagle3", 1, ()),
        ("all", 4, (0, 1, 2, 3)),
        ("none", 4, ()),
        ((0, 3), 4, (0, 3)),
    ],
)
def test_plans(choice: str | tuple[int, ...], layers: int, ids: tuple[int, ...]) -> None:
    assert plan_layers(choice, layers).aux_layer_ids == ids


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayersRefused, match="layer 4 was asked for, the model has layers 0 to 3"):
        plan_layers((1, 4), 4)


def test_the_last_layer_does_not_come_from_the_setter() -> None:
    assert LayerPlan(4, (0, 3)).from_setter == (0,)
    assert LayerPlan(4, (0, 3)).has_last
    assert not LayerPlan(4, (0, 2)).has_last


@pytest.mark.parametrize("model", [StubModel, MarkingModel, DeepSeekLike])
@pytest.mark.parametrize("ids", [(0,), (1, 3), (2, 4), (0, 1, 2, 3, 4)])
def test_what_is_asked_for_is_captured(model: type[StubModel], ids: tuple[int, ...]) -> None:
    asked = model()
    capture_layers(asked, (3,))  # as SGLang's flag does before, with other layers
    capture_layers(asked, ids)
    assert captured_layers(asked) == ids
    assert asked.model.layers_to_capture == [layer + 1 for layer in ids]


@pytest.mark.parametrize("shift", [-1, 0, 2])
def test_a_setter_that_makes_something_else_of_the_ids_is_refused(shift: int) -> None:
    model = StubModel(shift=shift)
    with pytest.raises(LayersRefused, match=r"does not capture layers \[1, 3\]"):
        capture_layers(model, (1, 3))
    assert model.model.layers_to_capture == []
    assert not model.capture_aux_hidden_states


def test_a_model_whose_marks_differ_from_its_list_is_refused() -> None:
    model = MarkingModel()
    model.model.layers[0]._is_layer_to_capture = False
    setter = model.set_eagle3_layers_to_capture

    def also_marks_another(layer_ids: list[int]) -> None:
        setter(layer_ids)
        model.model.layers[5]._is_layer_to_capture = True

    model.set_eagle3_layers_to_capture = also_marks_another  # type: ignore[method-assign]
    with pytest.raises(LayersRefused, match="nothing that can be read back"):
        capture_layers(model, (1, 3))


def test_a_model_without_setters_is_refused() -> None:
    with pytest.raises(LayersRefused, match=r"Linear does not capture layers .* it has none of set_eagle3"):
        capture_layers(nn.Linear(2, 2), (1,))


def test_a_setter_that_raises_is_refused_with_its_words() -> None:
    model = StubModel()

    def raises(_layer_ids: list[int]) -> Any:
        raise ValueError("not this model")

    model.set_eagle3_layers_to_capture = raises  # type: ignore[method-assign]
    with pytest.raises(LayersRefused, match="ValueError: not this model"):
        capture_layers(model, (1,))


def test_none_asks_for_nothing() -> None:
    capture_layers(nn.Linear(2, 2), ())


def test_two_decoders_cannot_be_told_apart() -> None:
    assert captured_layers(nn.ModuleList([StubModel(), StubModel()])) is None


def test_the_final_norm_stands_beside_all_layers() -> None:
    model = StubModel(layers=6)
    assert find_final_norm(model, 6) is model.model.norm
    assert find_final_norm(model, 5) is None
    del model.model.norm
    model.model.norm_f = torch.nn.Identity()
    assert find_final_norm(model, 6) is model.model.norm_f
