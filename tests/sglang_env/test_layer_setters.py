"""Every setter of the installed SGLang: the plugin gets exactly the layers that it asks for, or refuses the model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
if __import__("importlib.util").util.find_spec("sglang") is None:
    pytest.skip("needs an SGLang environment", allow_module_level=True)

from statetap_sglang.layers import LayersRefused, capture_layers
from torch import nn

from tests.sglang_env.model_setters import LAYERS, SetterClass, setter_classes, stub_of

CLASSES = setter_classes()
MODELS = [one for one in CLASSES if not one.is_decoder]
ASKED = [(1, 5, 8), (0,), (1,), (2, 4), (LAYERS - 2,), tuple(range(LAYERS - 1))]

# They capture the outputs of the layers that they list, so a list that is one ahead would be wrong without a word.
CAPTURE_AFTER = {
    "BailingMoeV3ForCausalLM",
    "BeamForCausalLM",
    "DeepseekV4ForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "KimiLinearForCausalLM",
    "MuseGlimmerForCausalLM",
    "MuseSparkTextForCausalLM",
}
SERVED = {
    "DeepseekV2ForCausalLM",
    "GptOssForCausalLM",
    "Gemma3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
}


def captured(model: nn.Module) -> list[tuple[list[int], list[int] | None]]:
    """Per decoder: the layers whose inputs are captured, by its list and by its layers' marks."""
    found = []
    for module in model.modules():
        if "layers_to_capture" in vars(module):
            marks = [i for i, layer in enumerate(module.layers) if getattr(layer, "_is_layer_to_capture", False)]
            has_marks = any(hasattr(layer, "_is_layer_to_capture") for layer in module.layers)
            found.append((sorted(module.layers_to_capture), marks if has_marks else None))
    return found


def test_there_are_setters_to_test() -> None:
    assert len(MODELS) >= 25
    assert {one.name for one in MODELS} >= SERVED


@pytest.mark.parametrize("ids", ASKED, ids=str)
@pytest.mark.parametrize("chosen", MODELS, ids=str)
def test_exactly_what_is_asked_for_or_a_refusal(chosen: SetterClass, ids: tuple[int, ...]) -> None:
    model = stub_of(chosen, CLASSES)
    before = captured(model)
    try:
        capture_layers(model, ids)
    except LayersRefused:
        assert chosen.name not in SERVED
        assert captured(model) == before
        return
    assert chosen.name not in CAPTURE_AFTER
    wanted = [layer + 1 for layer in ids]
    assert captured(model) in ([(wanted, None)], [(wanted, wanted)])


@pytest.mark.parametrize("chosen", [one for one in MODELS if one.name in SERVED], ids=str)
def test_what_the_flag_chose_before_is_forgotten(chosen: SetterClass) -> None:
    model = stub_of(chosen, CLASSES)
    model.set_eagle3_layers_to_capture(None)
    capture_layers(model, (3, 6))
    assert captured(model) in ([([4, 7], None)], [([4, 7], [4, 7])])
