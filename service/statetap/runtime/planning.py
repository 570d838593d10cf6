"""From a submission to a plan: what will be captured, where every row goes, whether it fits. Decided before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statetap.core.capture import Refusal, RefusalReason
from statetap.core.placement import Geometry, Placement, choose_geometry, dataset_order, permutation, place
from statetap.core.records import DatasetRecord, JobSpec, SampleRecord, SampleStatus, UnitRecord, UnitState
from statetap.core.reservation import unit_dump_bytes
from statetap.core.spec import CaptureSpec, Compression, Final, HiddenArray, Identity, preset
from statetap.core.strict import tells_itself_apart
from statetap.ports import OpenDataset, StoreFacts, TapSeen
from statetap.runtime.dump_space import USABLE_BUDGET
from statetap.runtime.views import JobSubmission, RefusalKind, Refused

# Of a dump budget, what one unit may take, so that the next one can be collected while it is written.
UNIT_SHARE_OF_BUDGET = 0.25
TOKEN_ROW_BYTES = 5
# Each of the threads that write holds a chunk that it compresses three times.
MOST_COMPRESSED_CHUNK_BYTES = 64 << 20
SAMPLES_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class Workers:
    """What the fitting workers have in common: one capture of one model, and the tightest of their limits."""

    taps: tuple[TapSeen, ...]
    context_length: int | None

    @property
    def budget_bytes(self) -> int:
        return int(min(tap.budget_bytes for tap in self.taps) * USABLE_BUDGET)

    @property
    def chunk(self) -> int | None:
        chunks = [tap.chunked_prefill_size for tap in self.taps if tap.chunked_prefill_size is not None]
        return min(chunks, default=None)


@dataclass(frozen=True, slots=True)
class Plan:
    """A job's plan. `lengths` are rows per dataset index after truncation, 0 where a sample is left out for `reasons[index]`."""

    spec: JobSpec
    lengths: NDArray[np.int64]
    reasons: dict[int, tuple[SampleStatus, str]]
    placement: Placement
    store_bytes: int

    def units(self, job: str) -> Iterator[UnitRecord]:
        return unit_records(job, self.placement)

    def samples(self, job: str, dataset: OpenDataset) -> Iterator[SampleRecord]:
        """In dataset order: placed ones pending, the others with their verdict."""
        starts = np.full(len(self.lengths), -1, dtype=np.int64)
        units = np.zeros(len(self.lengths), dtype=np.int64)
        placed = np.asarray(self.placement.order, dtype=np.int64)
        starts[placed] = self.placement.row_starts
        indexes = np.array([unit.index for unit in self.placement.units], np.int64)
        units[placed] = np.repeat(indexes, np.array([unit.count for unit in self.placement.units], np.int64))
        full = dataset.lengths
        pending = (SampleStatus.PENDING, None)
        for first in range(0, len(self.lengths), SAMPLES_AT_ONCE):
            stop = min(first + SAMPLES_AT_ONCE, len(self.lengths))
            span = slice(first, stop)
            # As Python's own numbers, which numpy gives out much faster many at a time.
            numbers = (values[span].tolist() for values in (units, starts, self.lengths, full))
            columns = zip(dataset.ids(first, stop), *numbers, strict=True)
            for index, (id_, unit, row_start, length, whole) in enumerate(columns, first):
                status, reason = self.reasons.get(index, pending)
                is_placed = status is SampleStatus.PENDING
                yield SampleRecord(
                    job=job,
                    sample=index,
                    id=id_,
                    unit=unit if is_placed else None,
                    row_start=row_start,
                    length=length if is_placed else whole,
                    status=status,
                    reason=reason,
                )


def unit_records(job: str, placement: Placement) -> Iterator[UnitRecord]:
    for unit in placement.units:
        yield UnitRecord(
            job=job,
            index=unit.index,
            row_start=unit.row_start,
            rows=unit.rows,
            samples=tuple(index for index, _ in placement.samples_of(unit)),
            state=UnitState.PENDING,
        )


def resolve_capture(submission: JobSubmission, taps: Sequence[TapSeen]) -> tuple[TapSeen, ...]:
    """The workers whose capture is the one asked for, or the only one there is.

    Raises:
        Refused: none is, or several are and nothing tells which is meant.
    """
    if not taps:
        raise Refused(
            RefusalKind.CONFLICT,
            "no worker has told the model's shape yet: add one (POST /v1/workers, or [[workers]] in statetap.toml) and wait "
            "until GET /v1/workers shows it ready",
        )
    fitting = [tap for tap in taps if _asked_for(submission, tap)]
    if not fitting:
        there = "; ".join(sorted({_describe(tap) for tap in taps}))
        raise Refused(
            RefusalKind.CONFLICT,
            f"no worker captures what the job asks for. A job captures what its workers are configured to capture: {there}",
            field="capture",
        )
    if submission.identity is None and any(tap.identity is Identity.TOKENS for tap in fitting):
        fitting = [tap for tap in fitting if tap.identity is Identity.TOKENS]
    kinds = {(tap.model.model_fingerprint, tap.model.dtype, tap.capture) for tap in fitting}
    if len(kinds) > 1:
        there = "; ".join(sorted({_describe(tap) for tap in fitting}))
        raise Refused(
            RefusalKind.CONFLICT,
            f"the workers differ, so the job must name its capture, or its workers' model must be the same: {there}",
            field="capture",
        )
    return tuple(fitting)


def _asked_for(submission: JobSubmission, tap: TapSeen) -> bool:
    layers, final = submission.aux_layer_ids, submission.final
    if submission.preset is not None:
        named = preset(submission.preset, tap.model.num_layers)
        layers, final = named.aux_layer_ids if layers is None else layers, named.final if final is None else final
    same_layers = layers is None or tuple(layers) == tap.capture.aux_layer_ids
    same_final = final is None or Final(final) == tap.capture.final
    by_tokens = submission.identity is not Identity.TOKENS or tap.identity is Identity.TOKENS
    return same_layers and same_final and by_tokens


def _describe(tap: TapSeen) -> str:
    capture, model = tap.capture, tap.model
    return f"layers {list(capture.aux_layer_ids)}, final {capture.final}, {model.dtype}, of {model.model_path}, by {tap.identity}"


def plan_job(
    submission: JobSubmission, record: DatasetRecord, dataset: OpenDataset, workers: Workers, store: str, facts: StoreFacts | None
) -> Plan:
    """Plan a job whole.

    Raises:
        Refused: it asks for something that cannot be, or a sample is over-long and `on_over_long` is `fail`.
    """
    tap = workers.taps[0]
    arrays = tap.capture.hidden_arrays(tap.model)
    identity = submission.identity or (
        Identity.TOKENS if all(t.identity is Identity.TOKENS for t in workers.taps) else Identity.COUNT
    )
    geometry = _geometry(submission, tap.capture, workers, arrays, facts)
    if submission.compression is not Compression.NONE:
        _require_small_chunks(geometry, arrays)
    lengths, reasons = _admit(submission, dataset, workers, arrays, identity)
    base = dataset_order(len(lengths)) if submission.order == "dataset" else permutation(len(lengths), submission.seed)
    order = [index for index in base if lengths[index] > 0]
    first_row = 0 if facts is None else -(-facts.rows // geometry.rows_per_shard) * geometry.rows_per_shard
    placement = place(lengths.tolist(), order, geometry, first_row=first_row)
    _require_room(placement, lengths.tolist(), arrays, workers)
    row_bytes = sum(array.row_bytes for array in arrays)
    spec = JobSpec(
        dataset=record.id,
        store=store,
        capture=tap.capture,
        model=tap.model,
        identity=identity,
        geometry=geometry,
        order=submission.order,
        seed=submission.seed,
        on_over_long=submission.on_over_long,
        first_row=first_row,
        first_sample=0 if facts is None else facts.samples,
        compression=submission.compression,
    )
    return Plan(spec, lengths, reasons, placement, stored_bytes(placement, lengths, geometry, row_bytes))


def _geometry(
    submission: JobSubmission, capture: CaptureSpec, workers: Workers, arrays: Sequence[HiddenArray], facts: StoreFacts | None
) -> Geometry:
    """The geometry asked for, else the store's own, else one whose units fit the dump budget several times."""
    rows_per_shard, rows_per_chunk = submission.rows_per_shard, submission.rows_per_chunk
    if facts is not None:
        rows_per_shard = rows_per_shard or int(facts.attributes["rows_per_shard"])
        rows_per_chunk = rows_per_chunk or int(facts.attributes["rows_per_chunk"])
    try:
        geometry = choose_geometry(arrays, rows_per_shard=rows_per_shard, rows_per_chunk=rows_per_chunk)
        if rows_per_shard is None:
            row_bytes = TOKEN_ROW_BYTES + sum(array.row_bytes for array in arrays)
            share = int(workers.budget_bytes * UNIT_SHARE_OF_BUDGET) // row_bytes
            chunk = geometry.rows_per_chunk
            geometry = choose_geometry(
                arrays, rows_per_shard=max(chunk, min(geometry.rows_per_shard, share - share % chunk)), rows_per_chunk=chunk
            )
    except ValueError as error:
        raise Refused(RefusalKind.INVALID, str(error), field="placement") from error
    return geometry


def _require_small_chunks(geometry: Geometry, arrays: Sequence[HiddenArray]) -> None:
    """Refused: chunks are compressed whole, in memory."""
    nbytes = geometry.rows_per_chunk * max(array.row_bytes for array in arrays)
    if nbytes > MOST_COMPRESSED_CHUNK_BYTES:
        raise Refused(
            RefusalKind.INVALID,
            f"chunks of {geometry.rows_per_chunk} rows have {nbytes:,} bytes, and are compressed up to "
            f"{MOST_COMPRESSED_CHUNK_BYTES:,}; choose a smaller rows_per_chunk (in a new store, if the store has it fixed), "
            "or submit the job with compression 'none'",
            field="placement",
        )


def _admit(
    submission: JobSubmission, dataset: OpenDataset, workers: Workers, arrays: Sequence[HiddenArray], identity: Identity
) -> tuple[NDArray[np.int64], dict[int, tuple[SampleStatus, str]]]:
    """Rows per sample, 0 for those left out, and why those are."""
    lengths = np.array(dataset.lengths, dtype=np.int64)
    limit, limited_by = _longest(workers, arrays)
    reasons: dict[int, tuple[SampleStatus, str]] = {}
    for index in np.flatnonzero(lengths > limit).tolist():
        why = f"sample {dataset.id(index)!r} (number {index + 1}) has {lengths[index]} tokens, the {limited_by} allows {limit}"
        if submission.on_over_long == "fail":
            raise Refused(
                RefusalKind.INVALID,
                f"{why}; shorten it, or submit the job with on_over_long 'truncate' or 'skip'",
                field="on_over_long",
                line=index + 1,
            )
        if submission.on_over_long == "truncate":
            lengths[index] = limit
        else:
            detail = f"{lengths[index]} tokens, the {limited_by} allows {limit}"
            reasons[index] = (SampleStatus.SKIPPED, str(Refusal(RefusalReason.OVER_LONG, detail)))
    if identity is Identity.COUNT:
        reason = str(Refusal(RefusalReason.TOO_SHORT, "matching by count cannot tell a dump of 1 row from a decode pass"))
        chunks = {tap.chunked_prefill_size for tap in workers.taps}
        for index, length in enumerate(lengths.tolist()):
            if index not in reasons and not all(tells_itself_apart(length, chunk) for chunk in chunks):
                reasons[index] = (SampleStatus.FAILED, reason)
    lengths[list(reasons)] = 0
    return lengths, reasons


def _longest(workers: Workers, arrays: Sequence[HiddenArray]) -> tuple[int, str]:
    """The longest sample that every worker can take, in tokens, and what limits it."""
    row_bytes = TOKEN_ROW_BYTES + sum(array.row_bytes for array in arrays)
    longest = workers.budget_bytes // row_bytes
    while longest > 1 and unit_dump_bytes([longest], arrays, workers.chunk) > workers.budget_bytes:
        longest = longest * 15 // 16
    if workers.context_length is not None and workers.context_length - 1 <= longest:
        # One place is needed for the token that the worker answers.
        return workers.context_length - 1, f"workers' context of {workers.context_length} tokens (one of them for the answer)"
    return longest, f"workers' dump budget of {workers.budget_bytes} usable bytes"


def _require_room(placement: Placement, lengths: Sequence[int], arrays: Sequence[HiddenArray], workers: Workers) -> None:
    """Refused: a unit's dumps would not fit a worker's dump directory, so that it could never be started."""
    # Of each length once: a million samples have few.
    needs = {length: unit_dump_bytes([length], arrays, workers.chunk) for length in set(lengths)}
    for unit in placement.units:
        need = sum(needs[lengths[index]] for index in placement.order[unit.first : unit.first + unit.count])
        if need > workers.budget_bytes:
            raise Refused(
                RefusalKind.INVALID,
                f"unit {unit.index}, of {unit.count} samples in {unit.rows} rows, needs {need:,} bytes of a dump directory, "
                f"the workers' dump budget allows {workers.budget_bytes:,}; choose a smaller rows_per_shard (in a new store, "
                "if the store has it fixed), or give the workers a larger budget",
                field="placement",
            )


def stored_bytes(placement: Placement, lengths: NDArray[np.int64], geometry: Geometry, row_bytes: int) -> int:
    """Bytes that the plan's hidden arrays and tokens will take at most, that is uncompressed: whole chunks, each once."""
    if not placement.order:
        return 0
    starts = np.asarray(placement.row_starts, dtype=np.int64)
    ends = starts + lengths[np.asarray(placement.order, dtype=np.int64)]
    first, last = starts // geometry.rows_per_chunk, (ends - 1) // geometry.rows_per_chunk
    shared = int(np.count_nonzero(first[1:] == last[:-1]))
    chunks = int((last - first + 1).sum()) - shared
    return chunks * geometry.rows_per_chunk * row_bytes + placement.rows * TOKEN_ROW_BYTES
