"""verify: against stores of a tiny model whose states were collected layer by layer, by hooks of the test's own."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import typer
from statetap.core.placement import Geometry
from statetap_client import layout
from statetap_client.commands_verify import verify
from statetap_client.reader import StoreReader
from statetap_client.verify import choose, relative_error, verify_against_model, verify_digests
from statetap_client.verify_reference import ModelUnusable
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.fakes.store_on_disk import AUX, LAST, PRENORM, hidden_arrays, write_store

LAYERS = [0, 2, 3]  # of 4: the first, one in between, and the last
HIDDEN = 16
GEOMETRY = Geometry(rows_per_shard=16, rows_per_chunk=4, alignment=2)
IDS = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4, 5], list(range(1, 24)), [9, 8, 7])]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(config)
    # A final norm of all ones would hide a mix-up of both final states in part.
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(path)
    return path


def states_of(model_dir, dtype: str, layers=LAYERS):
    """Every sample's arrays, by hooks on the decoder layers and the norm."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    seen: dict[object, torch.Tensor] = {}

    def keep(key):
        def hook(module, inputs, output):
            seen[key] = (output[0] if isinstance(output, tuple) else output)[0].detach()

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(i))
    model.model.norm.register_forward_hook(keep("norm"))
    samples = []
    for ids in IDS:
        with torch.no_grad():
            model(torch.from_numpy(ids).long()[None], use_cache=False)
        aux = torch.stack([seen[i] for i in layers], dim=1)
        samples.append({AUX: as_numpy(aux), LAST: as_numpy(seen["norm"]), PRENORM: as_numpy(seen[3])})
    return samples


def as_numpy(tensor: torch.Tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def make_store(path, samples, dtype: str = "float32", **changes):
    arrays = hidden_arrays(dtype, layers=len(LAYERS), hidden=HIDDEN)
    write_store(
        path, arrays, samples, geometry=GEOMETRY, **{"input_ids": IDS, "failed": frozenset(), "aux_layer_ids": LAYERS} | changes
    )
    return StoreReader(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_models_own_states_pass(tmp_path, model_dir, dtype) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, dtype), dtype)
    seen = []
    report = verify_against_model(store, model_dir, progress=lambda done, total: seen.append((done, total)))
    assert report.failures == []
    assert report.ok
    assert (report.checked, report.stored) == (3, 3)
    assert set(report.max_error) == {f"{AUX}[layer {i}]" for i in LAYERS} | {LAST, PRENORM}
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_shifted_layers_fail_and_are_named(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32", layers=[1, 2, 3]))
    report = verify_against_model(store, model_dir)
    assert {failure.array for failure in report.failures} == {f"{AUX}[layer 0]"}
    assert {failure.id for failure in report.failures} == {"sample-0", "sample-1", "sample-2"}
    assert all(failure.error > failure.tolerance == 1e-5 for failure in report.failures)


def test_swapped_final_states_fail(tmp_path, model_dir) -> None:
    samples = [{**sample, LAST: sample[PRENORM], PRENORM: sample[LAST]} for sample in states_of(model_dir, "float32")]
    report = verify_against_model(make_store(tmp_path / "s", samples), model_dir)
    assert {failure.array for failure in report.failures} == {LAST, PRENORM}


def test_states_of_other_tokens_fail(tmp_path, model_dir) -> None:
    other = [IDS[0][::-1].copy(), *IDS[1:]]
    report = verify_against_model(make_store(tmp_path / "s", states_of(model_dir, "float32"), input_ids=other), model_dir)
    assert {failure.index for failure in report.failures} == {0}


def test_a_value_that_is_not_finite_fails(tmp_path, model_dir) -> None:
    samples = states_of(model_dir, "float32")
    samples[1][LAST][3, 5] = np.nan
    report = verify_against_model(make_store(tmp_path / "s", samples), model_dir)
    assert [(f.index, f.array, f.error) for f in report.failures] == [(1, LAST, float("inf"))]


def test_token_ids_outside_of_the_vocabulary_fail(tmp_path, model_dir) -> None:
    strange = [IDS[0] + 100, *IDS[1:]]
    report = verify_against_model(make_store(tmp_path / "s", states_of(model_dir, "float32"), input_ids=strange), model_dir)
    assert [str(f) for f in report.failures] == [
        "sample 0 (id 'sample-0'): input_ids: token id 101 is outside of the model's vocabulary of 50"
    ]


def test_small_errors_pass_within_the_tolerance(tmp_path, model_dir) -> None:
    samples = [{**sample, LAST: sample[LAST] * np.float32(1.01)} for sample in states_of(model_dir, "float32")]
    store = make_store(tmp_path / "s", samples)
    assert not verify_against_model(store, model_dir).ok
    assert verify_against_model(store, model_dir, tolerance=0.02).ok


def test_chunked_prefill_widens_the_16_bit_tolerance(tmp_path, model_dir) -> None:
    samples = [
        {**sample, LAST: (sample[LAST].astype(np.float32) * 1.03).astype(np.float16)}
        for sample in states_of(model_dir, "float16")
    ]
    store = make_store(tmp_path / "s", samples, "float16")
    assert not verify_against_model(store, model_dir).ok
    assert verify_against_model(store, model_dir, chunked=True).ok


def test_a_model_with_too_few_layers_is_refused(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32"), aux_layer_ids=[0, 2, 30])
    with pytest.raises(ModelUnusable, match=r"layer 30.* has 4 layers"):
        verify_against_model(store, model_dir)


def test_a_directory_without_a_model_is_refused(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelUnusable, match=r"neither a config\.json nor exactly one GGUF"):
        verify_against_model(store, tmp_path / "empty")


def flip_a_byte(store_path) -> None:
    path = store_path / layout.shard_key(LAST, 0, (HIDDEN,))
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def test_digests(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32"), failed=frozenset({1}))
    report = verify_digests(store)
    assert (report.ok, report.checked) == (True, 2)
    flip_a_byte(tmp_path / "s")
    report = verify_digests(store)
    assert [failure.index for failure in report.failures] == [0]
    assert "was recorded" in report.failures[0].reason


def test_a_lost_object_is_a_failure_and_the_rest_is_checked(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32"))
    (tmp_path / "s" / layout.shard_key(LAST, 0, (HIDDEN,))).unlink()
    for report in (verify_digests(store), verify_against_model(store, model_dir)):
        assert report.checked == 3
        assert [failure.index for failure in report.failures] == [0]
        assert "is missing" in report.failures[0].reason


def test_samples_are_drawn_by_seed(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32"))
    assert choose(store, None, 0) == choose(store, 99, 0) == [0, 1, 2]
    drawn = {tuple(choose(store, 1, seed)) for seed in range(20)}
    assert drawn == {(0,), (1,), (2,)}
    assert choose(store, 2, 5) == choose(store, 2, 5)


def test_nothing_checked_is_not_ok(tmp_path, model_dir) -> None:
    store = make_store(tmp_path / "s", states_of(model_dir, "float32"), failed=frozenset({0, 1, 2}))
    assert not verify_digests(store).ok
    assert not verify_against_model(store, model_dir).ok


def test_relative_error() -> None:
    ones = torch.ones(2, 2)
    assert relative_error(ones, ones) == 0
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(ones, ones * 0) == float("inf")
    assert relative_error(ones * 0, ones * 0) == 0


class TestCommand:
    @pytest.fixture
    def run(self):
        app = typer.Typer()
        app.command()(verify)
        return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])

    def test_a_good_store(self, tmp_path, model_dir, run) -> None:
        make_store(tmp_path / "s", states_of(model_dir, "float32"))
        result = run(tmp_path / "s", "--model", model_dir)
        assert result.exit_code == 0, result.output
        assert "digests: 3 of 3 stored samples checked, 0 failures" in result.output
        assert "model: aux_hidden_states[layer 3]: largest relative error" in result.output
        assert result.stdout.endswith("\nverified\n")

    def test_a_damaged_store(self, tmp_path, model_dir, run) -> None:
        make_store(tmp_path / "s", states_of(model_dir, "float32"))
        flip_a_byte(tmp_path / "s")
        result = run(tmp_path / "s")
        assert result.exit_code == 1
        assert "digests: sample 0 (id 'sample-0'): digest" in result.output
        assert "NOT verified" in result.output

    def test_json(self, tmp_path, model_dir, run) -> None:
        make_store(tmp_path / "s", states_of(model_dir, "float32"))
        result = run(tmp_path / "s", "--model", model_dir, "--samples", "2", "--json")
        answer = json.loads(result.stdout)
        assert answer["ok"] is True
        assert answer["digests"]["checked"] == answer["model"]["checked"] == 2

    def test_usage(self, tmp_path, model_dir, run) -> None:
        assert run(tmp_path / "nothing").exit_code == 2
        make_store(tmp_path / "s", states_of(model_dir, "float32"))
        assert run(tmp_path / "s", "--samples", "0").exit_code == 2
        result = run(tmp_path / "s", "--model", tmp_path)
        assert result.exit_code == 2
        assert "--model" in result.output
