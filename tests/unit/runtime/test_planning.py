"""From a submission to a plan: geometry, limits, rows, bytes, and what is refused with which words."""

from dataclasses import replace

import numpy as np
import pytest
from statetap.core.placement import permutation
from statetap.core.records import SampleStatus
from statetap.core.reservation import unit_dump_bytes
from statetap.core.spec import CaptureSpec, Compression, Final, Identity
from statetap.ports import StoreFacts
from statetap.runtime.planning import Workers, plan_job, resolve_capture
from statetap.runtime.views import JobSubmission, RefusalKind, Refused

from tests.fakes.datasets import MemoryDatasets
from tests.fakes.harness import ARRAYS, CAPTURE, MODEL, ROW_BYTES, TAP

COUNT_TAP = replace(TAP, tap="plain", identity=Identity.COUNT)


def dataset(*lengths):
    datasets = MemoryDatasets()
    record = datasets.put([(f"s{i}", [i + 1] * n, [1] * n) for i, n in enumerate(lengths)])
    return record, datasets._datasets[record.id]


def plan(*lengths, taps=(TAP,), context=512, facts=None, **asked):
    record, opened = dataset(*lengths)
    submission = JobSubmission(**({"dataset": record.id, "store": "store"} | asked))
    return plan_job(submission, record, opened, Workers(taps, context), "store", facts), opened


def refusal(*lengths, **asked):
    with pytest.raises(Refused) as caught:
        plan(*lengths, **asked)
    return caught.value


# --- geometry


def test_asked_geometry_is_taken():
    made, _ = plan(3, 3, rows_per_shard=16, rows_per_chunk=8)
    assert (made.spec.geometry.rows_per_shard, made.spec.geometry.rows_per_chunk) == (16, 8)


def test_default_units_fit_the_tightest_budget_four_times():
    small = replace(TAP, tap="small", budget_bytes=1 << 20)
    made, _ = plan(3, taps=(TAP, small), rows_per_chunk=64)
    rows = made.spec.geometry.rows_per_shard
    share = int((1 << 20) * 0.9) // 4
    assert rows * (ROW_BYTES + 5) <= share < (rows + 64) * (ROW_BYTES + 5)


def test_a_unit_that_no_dump_directory_could_hold_is_refused_with_figures():
    tight = replace(TAP, budget_bytes=100_000)
    refused = refusal(*[40] * 40, taps=(tight,), rows_per_shard=1600, rows_per_chunk=40)
    need = unit_dump_bytes([40] * 40, ARRAYS, None)
    assert (refused.kind, refused.field) == (RefusalKind.INVALID, "placement")
    assert f"{need:,}" in refused.detail
    assert "90,000" in refused.detail
    assert "rows_per_shard" in refused.detail


def test_a_geometry_that_does_not_divide_is_refused():
    refused = refusal(3, rows_per_shard=10, rows_per_chunk=4)
    assert (refused.kind, refused.field) == (RefusalKind.INVALID, "placement")
    assert "rows_per_shard 10 must be a multiple of rows_per_chunk, 4" in refused.detail


def test_chunks_that_are_compressed_must_fit_in_memory_three_times():
    chunk = (64 << 20) // max(array.row_bytes for array in ARRAYS)
    for rows in (chunk, chunk + 1):
        made, _ = plan(3, rows_per_chunk=rows, rows_per_shard=rows)
        assert made.spec.compression is Compression.NONE
    made, _ = plan(3, rows_per_chunk=chunk, rows_per_shard=chunk, compression=Compression.ZSTD)
    assert made.spec.compression is Compression.ZSTD
    refused = refusal(3, rows_per_chunk=chunk + 1, rows_per_shard=chunk + 1, compression=Compression.ZSTD)
    assert (refused.kind, refused.field) == (RefusalKind.INVALID, "placement")
    assert "up to 67,108,864; choose a smaller rows_per_chunk" in refused.detail


def test_an_existing_store_gives_the_geometry_and_the_job_comes_after_it():
    facts = StoreFacts(rows=17, samples=5, attributes={"rows_per_shard": 8, "rows_per_chunk": 4})
    made, _ = plan(3, 3, facts=facts)
    assert made.spec.geometry.rows_per_shard == 8
    assert (made.spec.first_row, made.spec.first_sample) == (24, 5)
    assert list(made.placement.row_starts) == [24, 27]


# --- order and rows


def test_a_permutation_orders_the_rows_and_not_the_samples():
    made, opened = plan(*[2] * 20, order="permutation", seed=7, rows_per_shard=8, rows_per_chunk=4)
    order = list(permutation(20, 7))
    assert list(made.placement.order) == order != list(range(20))
    samples = list(made.samples("j", opened))
    assert [s.sample for s in samples] == list(range(20))
    assert [samples[i].row_start for i in order] == [2 * k for k in range(20)]
    for unit in made.units("j"):
        assert all(samples[i].unit == unit.index for i in unit.samples)


def test_dataset_order_is_the_order():
    made, _ = plan(2, 3, 4)
    assert list(made.placement.order) == [0, 1, 2]


# --- limits


@pytest.mark.parametrize(("length", "fits"), [(99, True), (100, False)])
def test_one_place_of_the_context_is_for_the_answer(length, fits):
    if fits:
        assert plan(length, context=100)[0].lengths.tolist() == [99]
    else:
        assert "workers' context of 100 tokens (one of them for the answer) allows 99" in refusal(length, context=100).detail


def test_an_over_long_sample_is_named_with_its_line_and_the_way_out():
    refused = refusal(5, 120, context=100)
    assert (refused.kind, refused.field, refused.line) == (RefusalKind.INVALID, "on_over_long", 2)
    assert refused.detail.startswith("sample 's1' (number 2) has 120 tokens, ")
    assert "'truncate' or 'skip'" in refused.detail


def test_truncation_keeps_the_head_up_to_the_limit():
    made, opened = plan(5, 120, context=100, on_over_long="truncate")
    assert made.lengths.tolist() == [5, 99]
    assert [(s.length, s.status) for s in made.samples("j", opened)] == [(5, SampleStatus.PENDING), (99, SampleStatus.PENDING)]


def test_a_skipped_sample_keeps_its_length_and_has_no_row():
    made, opened = plan(5, 120, 6, context=100, on_over_long="skip")
    skipped = list(made.samples("j", opened))[1]
    assert (skipped.status, skipped.unit, skipped.row_start, skipped.length) == (SampleStatus.SKIPPED, None, -1, 120)
    assert skipped.reason == "over_long: 120 tokens, the workers' context of 100 tokens (one of them for the answer) allows 99"
    assert list(made.placement.order) == [0, 2]


def test_the_longest_sample_that_a_budget_allows_does_fit_it():
    tight = replace(TAP, budget_bytes=200_000)
    made, _ = plan(10_000, taps=(tight,), context=None, on_over_long="truncate")
    (longest,) = made.lengths.tolist()
    assert unit_dump_bytes([longest], ARRAYS, None) <= 180_000 < unit_dump_bytes([longest * 17 // 15], ARRAYS, None)
    assert "dump budget of 180000 usable bytes allows" in refusal(longest + 1, taps=(tight,), context=None).detail


def test_a_job_of_nothing_but_skipped_samples_has_no_unit():
    made, _ = plan(120, 130, context=100, on_over_long="skip")
    assert (len(made.placement.units), made.store_bytes) == (0, 0)


# --- by count


def test_by_count_a_sample_with_a_dump_of_one_row_fails_beforehand():
    chunked = replace(COUNT_TAP, chunked_prefill_size=4)
    made, opened = plan(1, 4, 5, 6, taps=(chunked,))
    samples = list(made.samples("j", opened))
    assert made.spec.identity is Identity.COUNT
    assert [s.status for s in samples] == [SampleStatus.FAILED, SampleStatus.PENDING, SampleStatus.FAILED, SampleStatus.PENDING]
    assert samples[0].reason.startswith("too_short: ")
    assert samples[0].unit is None


def test_by_tokens_a_sample_of_one_token_is_fine():
    assert plan(1)[0].lengths.tolist() == [1]


# --- bytes


@pytest.mark.parametrize("seed", range(20))
def test_stored_bytes_are_those_of_the_touched_chunks(seed):
    rng = np.random.default_rng(seed)
    made, _ = plan(*rng.integers(1, 30, 15).tolist(), rows_per_shard=24, rows_per_chunk=int(rng.choice([2, 3, 4, 8])))
    chunk = made.spec.geometry.rows_per_chunk
    touched = {
        row // chunk
        for index, start in zip(made.placement.order, made.placement.row_starts, strict=True)
        for row in range(start, start + int(made.lengths[index]))
    }
    assert made.store_bytes == len(touched) * chunk * ROW_BYTES + made.placement.rows * 5


# --- which workers


def asked(**what):
    return JobSubmission(dataset="d", store="s", **what)


def conflict(taps, **what):
    with pytest.raises(Refused) as caught:
        resolve_capture(asked(**what), taps)
    assert caught.value.kind is RefusalKind.CONFLICT
    return caught.value


PRE_NORM = replace(TAP, tap="other", capture=CaptureSpec((1, 3), Final.PRE_NORM))


def test_without_a_worker_there_is_no_shape():
    assert "no worker has told the model's shape yet" in conflict([]).detail


def test_the_only_kind_there_is_is_meant():
    other = replace(TAP, tap="boot1-1")
    assert resolve_capture(asked(), [TAP, other]) == (TAP, other)


def test_several_kinds_must_be_told_apart_by_the_job():
    refused = conflict([TAP, PRE_NORM])
    assert refused.field == "capture"
    assert "layers [1, 3], final post_norm" in refused.detail
    assert "final pre_norm" in refused.detail
    assert resolve_capture(asked(final=Final.PRE_NORM), [TAP, PRE_NORM]) == (PRE_NORM,)


def test_other_models_and_dtypes_are_other_kinds():
    assert conflict([TAP, replace(TAP, model=replace(MODEL, model_fingerprint="another"))]).field == "capture"
    assert conflict([TAP, replace(TAP, model=replace(MODEL, dtype="float16"))]).field == "capture"


def test_what_nobody_captures_is_refused_with_what_there_is():
    refused = conflict([TAP], aux_layer_ids=(1,))
    assert "no worker captures what the job asks for" in refused.detail
    assert "layers [1, 3], final post_norm, float32, of org/model, by tokens" in refused.detail


def test_a_preset_stands_for_its_layers_unless_they_are_named():
    eagle3 = replace(TAP, capture=CaptureSpec((1, 3, 4), Final.POST_NORM))
    assert resolve_capture(asked(preset="eagle3"), [TAP, eagle3]) == (eagle3,)
    assert resolve_capture(asked(preset="eagle3", aux_layer_ids=CAPTURE.aux_layer_ids), [TAP, eagle3]) == (TAP,)
    assert "no worker captures" in conflict([TAP, eagle3], preset="speculators").detail


def test_stronger_evidence_is_taken_where_there_is_a_choice():
    assert resolve_capture(asked(), [COUNT_TAP, TAP]) == (TAP,)
    assert resolve_capture(asked(identity=Identity.COUNT), [COUNT_TAP, TAP]) == (COUNT_TAP, TAP)
    assert conflict([COUNT_TAP], identity=Identity.TOKENS).field == "capture"
