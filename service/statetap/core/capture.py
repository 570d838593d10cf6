"""Capture assembly: which dumps, if any, are the rows of one sample. Never guesses.

By tokens (plugin dumps): the ranges of one generation of one attempt tile `[0, T)` exactly and their token ids are the sample's.
By count (plain dumps, strict mode): the dump whose rows equal T, or with chunks of c rows the pattern c, c, …, remainder.
Identical bytes are one reading; two different readings that both fit are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from statetap.core.dumps import DumpFacts
from statetap.core.spec import CaptureSpec, HiddenArray

TOKEN_BYTES = 4


class RefusalReason(StrEnum):
    """Why a sample was not captured: the stable first word of every reason that is recorded for one, before a colon."""

    WRONG_TOKENS = "wrong_tokens"
    WRONG_TENSORS = "wrong_tensors"
    WRONG_CAPTURE = "wrong_capture"
    WRONG_PROMPT_LENGTH = "wrong_prompt_length"
    PREFIX_CACHED = "prefix_cached"
    OVERLAP = "overlap"
    AMBIGUOUS = "ambiguous"
    UNNAMED_DUMP = "unnamed_dump"
    MISSING_ROWS = "missing_rows"
    LOST_BY_PUBLISHER = "lost_by_publisher"
    BAD_VALUES = "bad_values"
    WRONG_CHECKSUM = "wrong_checksum"
    REQUEST_FAILED = "request_failed"
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    OVER_LONG = "over_long"
    TOO_SHORT = "too_short"


def reason_kind(reason: str) -> str:
    """The first word of a recorded reason, by which reasons are counted."""
    return reason.split(":", 1)[0]


@dataclass(frozen=True, slots=True)
class Complete:
    """The capture, its dumps in row order."""

    dump_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Nothing contradicts, but rows `[start, stop)` (the first gap) are missing so far."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RefusalReason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True, slots=True)
class NeedDigests:
    """Several dumps claim the same rows; the digests of their bytes decide whether they are one reading."""

    dump_ids: tuple[str, ...]


Verdict = Complete | Incomplete | Refusal | NeedDigests


@dataclass(frozen=True, slots=True)
class Expected:
    """What a capture must be: `token_ids` as little-endian int32 bytes, the spec, its hidden arrays, and the model."""

    token_ids: bytes
    arrays: tuple[HiddenArray, ...]
    capture: CaptureSpec
    model_fingerprint: str

    @property
    def rows(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    def misfit(self, dump: DumpFacts) -> Refusal | None:
        """Why this dump was not captured as the job asks, None if it was."""
        if dump.capture != self.capture:
            return Refusal(
                RefusalReason.WRONG_CAPTURE,
                f"dump {dump.dump_id} is from a tap that captures layers {list(dump.capture.aux_layer_ids)}, final "
                f"{dump.capture.final}; the job needs {list(self.capture.aux_layer_ids)}, {self.capture.final}",
            )
        if dump.model_fingerprint != self.model_fingerprint:
            return Refusal(
                RefusalReason.WRONG_CAPTURE,
                f"dump {dump.dump_id} is of model {dump.model_fingerprint}; the job needs {self.model_fingerprint}",
            )
        wanted = tuple((a.name, a.dtype, (dump.rows, *a.row_shape)) for a in self.arrays)
        if sorted(dump.tensors) == sorted(wanted):
            return None
        return Refusal(
            RefusalReason.WRONG_TENSORS, f"dump {dump.dump_id} holds {_tensors(dump.tensors)}, the job needs {_tensors(wanted)}"
        )


def _tensors(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in sorted(tensors)) or "no tensors"


def assemble_by_tokens(expected: Expected, dumps: Sequence[DumpFacts], digests: Mapping[str, int]) -> Verdict:
    """Judge the dumps of one attempt (all carry its rid).

    Rows beyond the prompt (decode passes) are strays and do not count. A retracted request is published again under a higher
    `retraction_count`: one generation must tile alone.
    """
    generations: dict[int, list[DumpFacts]] = defaultdict(list)
    for dump in dumps:
        if dump.prompt_len is not None and dump.prompt_len != expected.rows:
            return Refusal(
                RefusalReason.WRONG_PROMPT_LENGTH,
                f"dump {dump.dump_id} is of a prompt of {dump.prompt_len} tokens, not {expected.rows}",
            )
        if not is_prompt_row(dump, expected.rows):
            continue
        if misfit := expected.misfit(dump):
            return misfit
        first, last = TOKEN_BYTES * dump.prefix_len, TOKEN_BYTES * (dump.prefix_len + dump.rows)
        if dump.token_ids != expected.token_ids[first:last]:
            return Refusal(
                RefusalReason.WRONG_TOKENS,
                f"dump {dump.dump_id} has other token ids in its {dump.rows} rows from {dump.prefix_len} than the sample",
            )
        generations[dump.retraction_count].append(dump)
    if not generations:
        return Incomplete(0, expected.rows)
    tiled = [_tile(expected.rows, generation, digests) for _, generation in sorted(generations.items())]
    for verdict in tiled:
        if isinstance(verdict, Refusal | NeedDigests):
            return verdict
    complete = [verdict.dump_ids for verdict in tiled if isinstance(verdict, Complete)]
    if complete:
        return _one_reading(complete, digests)
    return tiled[-1]


def is_prompt_row(dump: DumpFacts, prompt_rows: int) -> bool:
    """Whether a dump's rows belong to the prompt; decode passes lie beyond it."""
    return 0 < dump.rows <= prompt_rows - dump.prefix_len


def _tile(rows: int, generation: list[DumpFacts], digests: Mapping[str, int]) -> Complete | Incomplete | Refusal | NeedDigests:
    """Tile `[0, rows)` with one generation's dumps. The same range twice is fine if the bytes are the same."""
    by_range: dict[tuple[int, int], list[DumpFacts]] = defaultdict(list)
    for dump in generation:
        by_range[dump.prefix_len, dump.rows].append(dump)
    chosen: list[str] = []
    covered, gap = 0, None
    for (start, count), same in sorted(by_range.items()):
        if start < covered:
            return Refusal(
                RefusalReason.OVERLAP,
                f"dump {same[0].dump_id} covers rows {start} to {start + count} again, up to {covered} are there",
            )
        if start > covered and gap is None:
            gap = Incomplete(covered, start)
        if len(same) > 1:
            reading = _one_reading([(dump.dump_id,) for dump in same], digests)
            if not isinstance(reading, Complete):
                return reading
        chosen.append(same[0].dump_id)
        covered = start + count
    if gap is not None:
        return gap
    return Complete(tuple(chosen)) if covered == rows else Incomplete(covered, rows)


def _one_reading(candidates: Sequence[tuple[str, ...]], digests: Mapping[str, int]) -> Complete | Refusal | NeedDigests:
    """The one reading that the candidates (dumps in row order) agree on, bit for bit."""
    first, *others = candidates
    if not others:
        return Complete(first)
    unknown = tuple(dump for candidate in candidates for dump in candidate if dump not in digests)
    if unknown:
        return NeedDigests(unknown)
    wanted = [digests[dump] for dump in first]
    for other in others:
        if [digests[dump] for dump in other] != wanted:
            return Refusal(RefusalReason.AMBIGUOUS, f"dumps {', '.join(first)} and {', '.join(other)} both fit and differ")
    return Complete(first)


def require_named(verdict: Verdict, dumps: Sequence[DumpFacts], named: Collection[str] | None) -> Verdict:
    """The verdict, but a refusal where the answer names its dumps (`named`, None: it does not) and the capture has another one.

    A worker names what it publishes for a request in the answer to it: a chosen dump that it does not know came another way.
    """
    if named is None or not isinstance(verdict, Complete):
        return verdict
    for dump in dumps:
        if dump.dump_id in verdict.dump_ids and dump.name not in named:
            known = ", ".join(sorted(named)) or "no dump"
            return Refusal(RefusalReason.UNNAMED_DUMP, f"the answer names {known}; dump {dump.dump_id} is not among them")
    return verdict


def assemble_by_count(expected: Expected, chunk: int | None, dumps: Sequence[DumpFacts], digests: Mapping[str, int]) -> Verdict:
    """Judge the plain dumps of one lifecycle, in the order of their counters.

    Dumps of other row counts are strays. Where more dumps than needed have a wanted row count, all must be the same bytes, or
    the capture is refused: nothing tells which is whose.
    """
    pattern = chunk_pattern(expected.rows, chunk)
    ordered = sorted(dumps, key=lambda dump: dump.sequence)
    chunks = [dump for dump in ordered if dump.rows == pattern[0]]
    for dump in ordered:
        if dump.rows in pattern and (misfit := expected.misfit(dump)):
            return misfit
    full = sum(1 for rows in pattern if rows == pattern[0])
    covered = full * pattern[0]
    if len(chunks) < full:
        return Incomplete(len(chunks) * pattern[0], expected.rows)
    if len(chunks) > full:
        if full > 1:
            return Refusal(RefusalReason.AMBIGUOUS, f"{len(chunks)} dumps have {pattern[0]} rows, {full} are expected")
        reading = _one_reading([(dump.dump_id,) for dump in chunks], digests)
        if not isinstance(reading, Complete):
            return reading
    chosen = [dump.dump_id for dump in chunks[:full]]
    if covered == expected.rows:
        return Complete(tuple(chosen))
    tails = [dump for dump in ordered if dump.rows == pattern[-1] and dump.sequence > chunks[full - 1].sequence]
    if not tails:
        return Incomplete(covered, expected.rows)
    reading = _one_reading([(dump.dump_id,) for dump in tails], digests)
    return Complete((*chosen, *reading.dump_ids)) if isinstance(reading, Complete) else reading


def chunk_pattern(rows: int, chunk: int | None) -> tuple[int, ...]:
    """The row counts of the dumps of a prompt: `(rows,)`, or c, c, …, remainder where prompts are split after c tokens."""
    if chunk is None or rows <= chunk:
        return (rows,)
    full, rest = divmod(rows, chunk)
    return (chunk,) * full + ((rest,) if rest else ())
