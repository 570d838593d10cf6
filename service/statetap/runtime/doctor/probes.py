"""The checks that need prompts: a round trip, an answer of several tokens, the same prompt twice, a prompt in two chunks."""

from __future__ import annotations

import numpy as np

from statetap.core.capture import Refusal, RefusalReason
from statetap.core.spec import Identity
from statetap.ports import InferenceError
from statetap.runtime.doctor.findings import Finding, error, note, ok, warning
from statetap.runtime.doctor.inputs import Announced
from statetap.runtime.doctor.probing import Capture, Probe, ProbeSession
from statetap.runtime.doctor.prompts import Room, TokenIds, fillers, random_prompt
from statetap.runtime.doctor.refusals import way_out
from statetap.runtime.doctor.states import UNRELATED, States, relative_error, relative_errors, rounding, told

ANSWER_TOKENS = 5
# A scheduler may begin before it has all prompts of a request, and then splits none.
SPLIT_ATTEMPTS = 3


class Probes:
    """Runs the checks on one worker, one after the other, into `findings`; an error ends them, for the rest stands on it.

    `states` are what the prompt that all workers are sent gave here, None as long as it gave none.
    """

    def __init__(
        self,
        session: ProbeSession,
        announced: Announced,
        identity: Identity,
        room: Room,
        *,
        page: int,
        random: np.random.Generator,
    ) -> None:
        self.findings: list[Finding] = []
        self.states: States | None = None
        self._session = session
        self._announced = announced
        self._identity = identity
        self._room = room
        self._page = page
        self._random = random
        self._bound = rounding(announced.dtype)

    async def run(self, prompt: TokenIds) -> None:
        """`prompt` is short enough to be run in one pass."""
        check = "round_trip"
        try:
            first = await self._round_trip(prompt)
            if first is None:
                return
            self.states = first.states
            check = "decode_rows"
            # One token shorter: where rows are counted, two lifecycles in a row must differ.
            several = await self._several_tokens(self._random_prompt(len(prompt) - 1))
            if several is None:
                return
            check = "same_prompt_twice"
            repeatable = await self._again(prompt, first)
            # What a pass published before has appeared by now: a tap publishes in order.
            self._decode_rows(several)
            if not repeatable:
                return
            check = "chunked"
            if self._identity is Identity.TOKENS:
                await self._in_two_chunks(prompt, first)
            else:
                await self._longer_than_a_chunk(len(prompt))
        except InferenceError as failure:
            self.findings.append(
                error(
                    check,
                    f"a prompt was not answered: {failure}",
                    "look into the server's log; raise --timeout if it is only slow",
                )
            )

    async def _round_trip(self, prompt: TokenIds) -> Capture | None:
        (probe,) = await self._session.send(prompt)
        first = await self._captured("round_trip", probe)
        if first is None:
            return None
        evidence = "as many rows as tokens" if self._identity is Identity.COUNT else "these token ids and all rows"
        self.findings.append(ok("round_trip", f"a prompt of {len(prompt)} tokens came back with {evidence}, in {_dumps(first)}"))
        self.findings.append(ok("values", "every row is finite, not all zero and not constant"))
        if first.has_checksums:
            self.findings.append(ok("row_checksums", "every row is what its source computed"))
        elif self._identity is Identity.TOKENS:
            self.findings.append(
                note("row_checksums", "the dumps carry none", "install this service's version of statetap-sglang in the server")
            )
        self._last_layer(first.states)
        return first

    def _last_layer(self, states: States) -> None:
        """The final state before the norm is the last layer's output: where both are captured, they must say the same."""
        last, before_norm = f"layer {self._announced.num_layers - 1}", "pre_norm"
        if last not in states or before_norm not in states:
            return
        apart = relative_error(states[before_norm], states[last])
        if apart > self._bound:
            self.findings.append(
                error(
                    "layers",
                    f"{before_norm} must be the output of the last layer, but is {apart:.1e} away from {last}",
                    "do not use this worker: its layers are shifted, or its final state is not what it says",
                )
            )
        else:
            self.findings.append(ok("layers", f"{before_norm} is the output of {last}"))

    async def _several_tokens(self, prompt: TokenIds) -> Probe | None:
        (probe,) = await self._session.send(prompt, new_tokens=ANSWER_TOKENS)
        return probe if await self._captured("decode_rows", probe, keep=True) is not None else None

    def _decode_rows(self, probe: Probe) -> None:
        found = probe.beyond_prompt
        self._session.release(probe)
        if found:
            self.findings.append(
                warning(
                    "decode_rows",
                    f"{found} dumps of decode passes were published with a prompt of {probe.rows} tokens",
                    "keep them out at the source (statetap-sglang does): they take room and time, and by count they look like "
                    "prompts of one token",
                )
            )
        else:
            self.findings.append(ok("decode_rows", f"none, for an answer of {ANSWER_TOKENS} tokens"))

    async def _again(self, prompt: TokenIds, first: Capture) -> bool:
        """Whether the same prompt brings the same once more, but for rounding."""
        (probe,) = await self._session.send(prompt)
        second = await self._captured("same_prompt_twice", probe)
        if second is None:
            return False
        seen = f"{len(prompt)} rows both times"
        if second.digest == first.digest:
            self.findings.append(ok("same_prompt_twice", f"{seen}, bit for bit the same"))
            return True
        errors = relative_errors(second.states, first.states)
        seen += f", relative difference {told(errors)}"
        repeatable = max(errors.values()) <= self._bound
        self.findings.append(
            ok("same_prompt_twice", seen)
            if repeatable
            else error(
                "same_prompt_twice",
                f"{seen}, which is more than rounding ({self._bound:g})",
                "do not use this worker: what it publishes is not what it computed, or it computes at random",
            )
        )
        return repeatable

    async def _in_two_chunks(self, prompt: TokenIds, whole: Capture) -> None:
        lengths = fillers(self._room, len(prompt), self._page)
        if isinstance(lengths, str):
            self.findings.append((ok if self._room.chunk is None else note)("chunked", f"not compared: {lengths}"))
            return
        for _ in range(SPLIT_ATTEMPTS):
            *others, probe = await self._session.send(*map(self._random_prompt, lengths), prompt)
            split = await self._captured("chunked", probe)
            for other in others:
                self._session.release(other)
            if split is None:
                return
            if split.dumps > 1:
                self._compare_chunks(split, whole)
                return
        self.findings.append(note("chunked", f"not compared: {SPLIT_ATTEMPTS} requests of more than a chunk split no prompt"))

    def _compare_chunks(self, split: Capture, whole: Capture) -> None:
        errors = relative_errors(split.states, whole.states)
        seen = f"in {split.dumps} chunks against one pass: relative difference {told(errors)}"
        worst = max(errors.values())
        if worst <= self._bound:
            self.findings.append(ok("chunked", seen))
        elif worst <= UNRELATED:
            self.findings.append(
                warning(
                    "chunked",
                    f"{seen}; up to {self._bound:g} is rounding",
                    "start the server with --chunked-prefill-size -1, or with another attention backend",
                )
            )
        else:
            self.findings.append(
                error(
                    "chunked",
                    seen,
                    "start the server with --chunked-prefill-size -1: its chunked prefill computes something else",
                )
            )

    async def _longer_than_a_chunk(self, prompt_tokens: int) -> None:
        """By count, a longer prompt must come as c, c, …, remainder."""
        chunk = self._room.chunk
        if chunk is None:
            return
        length = chunk + max(2, prompt_tokens // 2)
        if length > self._room.longest_prompt:
            self.findings.append(note("chunked", f"a prompt of more than {chunk:,} tokens has no room here, so none was tried"))
            return
        (probe,) = await self._session.send(self._random_prompt(length))
        capture = await self._captured("chunked", probe)
        if capture is not None:
            self.findings.append(ok("chunked", f"a prompt of {length:,} tokens came in {_dumps(capture)}, as declared"))

    async def _captured(self, check: str, probe: Probe, *, keep: bool = False) -> Capture | None:
        """The probe's rows, None where they were refused: then that is a finding. Its dumps are released unless they are kept."""
        outcome = await self._session.capture(probe)
        if isinstance(outcome, Refusal):
            self.findings.append(self._refusal(check, probe, outcome))
        if not keep or isinstance(outcome, Refusal):
            self._session.release(probe)
        return None if isinstance(outcome, Refusal) else outcome

    def _refusal(self, check: str, probe: Probe, refusal: Refusal) -> Finding:
        named = probe.answer.dumps if probe.answer is not None else None
        seen = str(refusal)
        if refusal.reason is RefusalReason.MISSING_ROWS and not probe.dumps:
            says = f"; the server says that it published {', '.join(sorted(named))}" if named else ""
            seen = f"the server answered, and nothing appeared in the dump directory for it{says}"
        return error(
            {"bad_values": "values", "wrong_checksum": "row_checksums"}.get(refusal.reason, check), seen, way_out(refusal.reason)
        )

    def _random_prompt(self, length: int) -> TokenIds:
        return random_prompt(self._random, length, self._announced.vocab_size)


def _dumps(capture: Capture) -> str:
    return "1 dump" if capture.dumps == 1 else f"{capture.dumps} dumps"
