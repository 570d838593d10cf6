from __future__ import annotations

from typing import Any

import pytest
import torch
from statetap.embedded.capture import UnsupportedModel, as_view, eagle3_layers, find_decoder
from statetap.embedded.model import TappedModel
from torch import nn
from transformers import DynamicCache

from tests.fakes.models import small_gpt2, small_gpt_neox, small_llama

MODELS = {"llama": small_llama, "gpt2": small_gpt2, "gpt_neox": small_gpt_neox}
PROMPT = tuple((i * 37 + 11) % 1024 for i in range(90))


def tapped(model: Any) -> TappedModel:
    return TappedModel(model, aux_layer_ids=tuple(range(model.config.num_hidden_layers)), final="both")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@torch.inference_mode()
def test_every_layer_and_both_final_states_are_hugging_faces(model: Any) -> None:
    """Its `hidden_states[i+1]` is the state after layer i, but its last one is after the final norm."""
    reference = model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False)
    states = tapped(model).run(PROMPT, DynamicCache()).states
    n, hidden = model.config.num_hidden_layers, model.config.hidden_size
    aux = states["aux_hidden_states"]
    assert aux.shape == (len(PROMPT), n, hidden)
    for i in range(n - 1):
        assert torch.equal(aux[:, i], reference.hidden_states[i + 1][0]), f"layer {i}"
    assert torch.equal(states["last_hidden_states"], reference.hidden_states[-1][0])
    assert torch.equal(aux[:, n - 1], states["last_hidden_states_prenorm"])
    norm = find_decoder(model).final_norm
    assert torch.equal(norm(states["last_hidden_states_prenorm"]), states["last_hidden_states"])
    assert not torch.equal(states["last_hidden_states_prenorm"], states["last_hidden_states"])


def test_the_answer_is_greedy_decodings(model: Any) -> None:
    with torch.inference_mode():
        expected = int(model(input_ids=torch.tensor([PROMPT])).logits[0, -1].argmax())
    assert tapped(model).run(PROMPT, DynamicCache()).next_token == expected


def test_the_same_prefill_gives_the_same_bits(model: Any) -> None:
    worker = tapped(model)
    once, again = (worker.run(PROMPT, DynamicCache()).states for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_chunks_give_the_values_of_one_prefill(model: Any) -> None:
    worker, cache = tapped(model), DynamicCache()
    whole = worker.run(PROMPT, DynamicCache()).states
    parts = [worker.run(PROMPT[start : start + 32], cache).states for start in range(0, len(PROMPT), 32)]
    for name, expected in whole.items():
        chunked = torch.cat([part[name] for part in parts])
        assert chunked.shape == expected.shape
        # Relative to the largest value: residual streams have massive activations.
        assert float((chunked - expected).abs().max() / expected.abs().max()) < 1e-5


def test_only_what_is_asked_for_is_captured() -> None:
    worker = TappedModel(small_llama(), aux_layer_ids=(0, 3), final="pre_norm")
    states = worker.run(PROMPT, DynamicCache()).states
    assert {name: tuple(t.shape) for name, t in states.items()} == {
        "aux_hidden_states": (90, 2, 64),
        "last_hidden_states_prenorm": (90, 64),
    }
    assert worker.run((5,), DynamicCache(), capture=False).states == {}


def test_the_default_layers_are_eagle3s() -> None:
    assert eagle3_layers(30) == (1, 14, 26)
    assert eagle3_layers(32) == (1, 15, 28)
    assert eagle3_layers(4) == (0, 1)
    assert TappedModel(small_llama(), aux_layer_ids=None, final="none").aux_layer_ids == (0, 1)


def test_layers_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"0\.\.3"):
        TappedModel(small_llama(), aux_layer_ids=(1, 4), final="none")


def test_a_model_of_another_build_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="Linear has no decoder"):
        find_decoder(nn.Linear(2, 2))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_a_view_holds_the_tensors_bytes(dtype: torch.dtype, name: str) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 3, 2).to(dtype)
    view = as_view(tensor.transpose(1, 2))
    assert (view.dtype, view.shape, view.nbytes) == (name, (4, 2, 3), len(view.data))
    assert torch.equal(torch.frombuffer(bytearray(view.data), dtype=dtype).reshape(4, 2, 3), tensor.transpose(1, 2))


def test_a_bfloat16_model_gives_bfloat16_states() -> None:
    worker = TappedModel(small_llama().to(torch.bfloat16), aux_layer_ids=(1,), final="both")
    assert worker.dtype == "bfloat16"
    assert {t.dtype for t in worker.run(PROMPT, DynamicCache()).states.values()} == {torch.bfloat16}
