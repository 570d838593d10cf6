"""The tap: follows one forward pass at a time, snapshots the rows of prompts, and hands them on to be published.

A pass runs `begin`, then `take_pre_norm` and `take_states` as the model comes by, then `finish`. All run on the forward path's
thread, so nothing here waits: no lock that is held for long, no file, no synchronisation with a device. None of them raises: a
failure in any step loses the captures of that pass, each with the reason, and nothing else. Knows nothing of SGLang.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import Concatenate, ParamSpec

import torch

from statetap_sglang.background import BackgroundPublisher, Dump, PublishPass, describe
from statetap_sglang.checks import CaptureFailed, StateShape, check_norm, check_same_rows, check_state, split_aux
from statetap_sglang.extend_pass import ExtendPass, PromptRows
from statetap_sglang.format import (
    AUX_HIDDEN_STATES,
    LAST_HIDDEN_STATES,
    LAST_HIDDEN_STATES_PRENORM,
    TOKEN_IDS,
    DumpMetadata,
    stem,
)
from statetap_sglang.header import fits_one_page
from statetap_sglang.layers import LayerPlan
from statetap_sglang.names import DumpNames
from statetap_sglang.pinned_files import Landing
from statetap_sglang.snapshot import SampleSnapshot, SnapshotRing, host_views

log = logging.getLogger("statetap")

# Rows of a pass on which the pre-norm and the post-norm state are compared.
SAMPLED_ROWS = 4
PRE_NORM, POST_NORM = "the pre-norm state", "the post-norm state"

States = torch.Tensor
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample's rows in the pass, its dump's number and metadata, and where the rows are kept."""

    rows: PromptRows
    number: int
    metadata: DumpMetadata
    snapshot: SampleSnapshot


@dataclass(slots=True)
class _Pass:
    """The pass under way. `seen` are the numbers of rows of the states that came by."""

    extend: ExtendPass
    samples: list[_Sample] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    pre_norm_rows: list[States] = field(default_factory=list)
    post_norm_rows: list[States] = field(default_factory=list)
    failure: str | None = None


def _loses_the_pass(
    step: Callable[Concatenate[StateTap, _Arguments], None],
) -> Callable[Concatenate[StateTap, _Arguments], None]:
    """A step that raises loses the pass's captures, and goes no further."""

    @functools.wraps(step)
    def guarded(tap: StateTap, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            step(tap, *args, **kwargs)
        except CaptureFailed as error:
            tap.fail(str(error))
        except Exception as error:
            log.exception("%s failed", step.__name__)
            tap.fail(f"{step.__name__} failed: {describe(error)}")

    return guarded


class StateTap:
    """One tap's forward path.

    `reserve_number` names a dump before it is written; `norm` is the model's final norm, for the check of pre-norm states;
    `tap_name` stands before the dumps' names in responses.
    """

    def __init__(
        self,
        *,
        plan: LayerPlan,
        ring: SnapshotRing,
        background: BackgroundPublisher,
        reserve_number: Callable[[], int],
        norm: Callable[[States], States] | None,
        boot_id: str,
        tap_name: str,
    ) -> None:
        layout = ring.layout
        self._plan = plan
        self._shape = StateShape(layout.hidden_size, layout.dtype)
        self._final = layout.final
        self._ring = ring
        self._background = background
        self._reserve_number = reserve_number
        self._norm = norm
        self._boot_id = boot_id
        self._tap_name = tap_name
        self._names = DumpNames()
        self._pass: _Pass | None = None

    @property
    def needs_pre_norm(self) -> bool:
        return self._final in ("pre_norm", "both") or self._plan.has_last

    def begin(self, extend: ExtendPass) -> None:
        """A pass starts. What cannot be kept, for want of room or for an obstacle, is lost here, request by request."""
        self.abandon("another pass began before this one ended")
        rows = extend.prompt_rows()
        if not rows:
            return
        self._pass = current = _Pass(extend)
        for one in rows:
            try:
                sample = self._reserve(extend, one)
            except Exception as error:
                log.exception("begin failed")
                self._background.lose(one.request.rid, f"begin failed: {describe(error)}")
                continue
            if sample is not None:
                current.samples.append(sample)

    @_loses_the_pass
    def take_pre_norm(self, state: States) -> None:
        """The final state before the norm, `[rows, hidden_size]`; also the last layer's output."""
        current = self._running(PRE_NORM)
        if current is None:
            return
        self._check(current, PRE_NORM, state)
        for sample in current.samples:
            rows, tensors = state[sample.rows.start : sample.rows.stop], sample.snapshot.tensors
            if LAST_HIDDEN_STATES_PRENORM in tensors:
                tensors[LAST_HIDDEN_STATES_PRENORM].copy_(rows)
            if self._plan.has_last:
                tensors[AUX_HIDDEN_STATES][:, -1].copy_(rows)
        current.pre_norm_rows = [state[row].clone() for row in _sampled_rows(current.samples)]

    @_loses_the_pass
    def take_states(self, aux: States | list[States] | tuple[States, ...] | None, post_norm: States) -> None:
        """The layers that the model captured, and the final state after the norm, `[rows, hidden_size]`."""
        current = self._running(POST_NORM)
        if current is None:
            return
        self._check(current, POST_NORM, post_norm)
        wanted = self._plan.from_setter
        layers = split_aux(aux, len(wanted), self._shape) if wanted else ()
        for name, layer in zip(wanted, layers, strict=True):
            self._check(current, f"layer {name}", layer)
        check_same_rows(current.seen)
        for sample in current.samples:
            start, stop, tensors = sample.rows.start, sample.rows.stop, sample.snapshot.tensors
            for position, layer in enumerate(layers):
                tensors[AUX_HIDDEN_STATES][:, position].copy_(layer[start:stop])
            if LAST_HIDDEN_STATES in tensors:
                tensors[LAST_HIDDEN_STATES].copy_(post_norm[start:stop])
        if self.needs_pre_norm:
            current.post_norm_rows = [post_norm[row].clone() for row in _sampled_rows(current.samples)]

    def finish(self, token_ids: torch.Tensor) -> dict[str, list[str]]:
        """The pass ended: publish. `token_ids` are the pass's own, `[rows]` or padded.

        Returns the names of all dumps so far of each request whose rows were in the pass.
        """
        current = self._pass
        if current is None:
            return {}
        self._publish(token_ids)
        self.abandon("the pass was not published")
        requests = (one.request.rid for one in current.extend.prompt_rows())
        return {rid: names for rid in requests if (names := self._names.of(rid)) is not None}

    def fail(self, reason: str) -> None:
        """Something went wrong in this pass: its captures are lost for this reason, unless an earlier one was given."""
        if self._pass is not None and self._pass.failure is None:
            self._pass.failure = reason

    def abandon(self, reason: str) -> None:
        """The pass, if there is one, did not come to its end: its captures are lost."""
        current, self._pass = self._pass, None
        if current is None:
            return
        for sample in current.samples:
            self._ring.release(sample.snapshot.span)
            self._background.lose(sample.rows.request.rid, current.failure or reason, sample.number)

    def _reserve(self, extend: ExtendPass, one: PromptRows) -> _Sample | None:
        """A name and room for one sample; None, and a loss recorded, where it cannot be captured."""
        request = one.request
        number = self._reserve_number()
        self._names.add(request.rid, f"{self._tap_name}/{stem(number)}")
        if request.obstacle is not None:
            self._background.lose(request.rid, request.obstacle, number)
            return None
        metadata = DumpMetadata(
            boot_id=self._boot_id,
            rid=request.rid,
            prefix_len=request.prefix_len,
            extend_len=request.extend_len,
            prompt_len=request.prompt_len,
            retraction_count=request.retraction_count,
            forward_pass=extend.forward_pass,
            forward_start_ns=extend.start_ns,
        )
        snapshot = self._ring.reserve(one.rows, in_place=fits_one_page(metadata))
        if snapshot is None:
            self._background.lose(request.rid, self._no_room(one.rows), number)
            return None
        return _Sample(one, number, metadata, snapshot)

    @_loses_the_pass
    def _publish(self, token_ids: torch.Tensor) -> None:
        current = self._pass
        if current is None or current.failure is not None or not current.samples:
            return
        self._check_complete(current, token_ids)
        for sample in current.samples:
            sample.snapshot.tensors[TOKEN_IDS].copy_(token_ids[sample.rows.start : sample.rows.stop])
            sample.snapshot.add_checksums()
        check = self._norm_check(current)
        arrival = self._ring.send([sample.snapshot for sample in current.samples])
        end_ns = monotonic_ns()
        dumps = tuple(self._dump(sample, end_ns) for sample in current.samples)
        self._pass = None
        self._background.publish(PublishPass(arrival, check, dumps))

    def _running(self, what: str) -> _Pass | None:
        """The pass, if it can still succeed."""
        current = self._pass
        if current is None or current.failure is not None or not current.samples:
            return None
        if what in current.seen:
            raise CaptureFailed(f"{what} came twice in one pass")
        return current

    def _check(self, current: _Pass, what: str, state: States) -> None:
        check_state(what, state, self._shape, rows=current.extend.rows, padded=current.extend.padded)
        current.seen[what] = state.shape[0]

    def _check_complete(self, current: _Pass, token_ids: torch.Tensor) -> None:
        if POST_NORM not in current.seen:
            raise CaptureFailed(f"{POST_NORM} did not come by in this pass: it did not run through the logits processor")
        if self.needs_pre_norm and PRE_NORM not in current.seen:
            raise CaptureFailed(f"{PRE_NORM} did not come by in this pass; start the server with --disable-prefill-cuda-graph")
        if token_ids.dim() != 1 or token_ids.shape[0] < current.extend.rows:
            raise CaptureFailed(f"the pass has token ids of shape {tuple(token_ids.shape)} for {current.extend.rows} rows")

    def _norm_check(self, current: _Pass) -> Callable[[], None]:
        """The comparison that is left for the publishing thread, its operands computed here."""
        if not self.needs_pre_norm or self._norm is None:
            return _nothing_to_check
        with torch.no_grad():
            normed = self._norm(torch.stack(current.pre_norm_rows))
        post = torch.stack(current.post_norm_rows)
        return functools.partial(check_norm, normed, post, self._shape.dtype)

    def _dump(self, sample: _Sample, end_ns: int) -> Dump:
        places = self._ring.layout.places(sample.rows.rows)
        return Dump(
            sample.number,
            replace(sample.metadata, forward_end_ns=end_ns),
            functools.partial(host_views, sample.snapshot.host, places),
            functools.partial(self._ring.release, sample.snapshot.span),
            sample.snapshot.span if isinstance(sample.snapshot.span, Landing) else None,
        )

    def _no_room(self, rows: int) -> str:
        needed = self._ring.layout.span_bytes(rows)
        if needed > self._ring.capacity:
            return f"{rows} rows take {needed} bytes, the ring has {self._ring.capacity}; raise STATETAP_PLUGIN_RING_BYTES"
        return "the ring is full: the server runs faster than dumps are published; raise STATETAP_PLUGIN_RING_BYTES"


def _sampled_rows(samples: Sequence[_Sample]) -> list[int]:
    """Rows of the pass spread evenly over its samples' rows, the first and the last among them."""
    total = sum(sample.rows.rows for sample in samples)
    positions = sorted({i * (total - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)})
    rows = []
    for sample in samples:
        while positions and positions[0] < sample.rows.rows:
            rows.append(sample.rows.start + positions.pop(0))
        positions = [position - sample.rows.rows for position in positions]
    return rows


def _nothing_to_check() -> None:
    return
