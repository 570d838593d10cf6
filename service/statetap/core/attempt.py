"""One attempt at one sample: a request, its answer, and the dumps that came with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from statetap.core import unit_messages as msg
from statetap.core.capture import Expected, Verdict, assemble_by_count, assemble_by_tokens, is_prompt_row
from statetap.core.dumps import DumpFacts
from statetap.core.spec import Identity


class AttemptState(StrEnum):
    ASKED = "asked"
    ANSWERED = "answered"
    INSPECTING = "inspecting"
    CAPTURED = "captured"
    DROPPED = "dropped"


@dataclass(slots=True)
class Attempt:
    """`chunk` is the declared chunk size of a worker that is matched by count, in tokens; by tokens nothing needs declaring.

    `named` are the dumps that the answer names, None if it names none. `probation`: its worker has to show by it that it is well.
    """

    rid: str
    sample: int
    worker: str
    expected: Expected
    identity: Identity
    chunk: int | None
    state: AttemptState = AttemptState.ASKED
    dumps: dict[str, DumpFacts] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    next_token: int = -1
    named: frozenset[str] | None = None
    digest: int = 0
    recalled: bool = False
    probation: bool = False
    asked_digests: bool = False
    asked_to_close: bool = False
    lifecycle_closed: bool = False

    def answered(self, event: msg.RequestAnswered) -> None:
        self.state = AttemptState.ANSWERED
        self.prompt_tokens, self.cached_tokens, self.next_token = event.prompt_tokens, event.cached_tokens, event.next_token
        self.named = event.named

    def wants(self, dump: DumpFacts) -> bool:
        """Whether a dump may still matter: decode passes and whatever comes after the choice are strays."""
        if self.state not in (AttemptState.ASKED, AttemptState.ANSWERED):
            return False
        return self.identity is Identity.COUNT or is_prompt_row(dump, self.expected.rows)

    def verdict(self) -> Verdict:
        dumps = list(self.dumps.values())
        if self.identity is Identity.TOKENS:
            return assemble_by_tokens(self.expected, dumps, self.digests, self.named)
        return assemble_by_count(self.expected, self.chunk, dumps, self.digests)

    @property
    def may_complete(self) -> bool:
        """By count, a capture is complete only once nothing more can come: its lifecycle is closed."""
        return self.identity is Identity.TOKENS or self.lifecycle_closed

    def ask_to_close(self) -> list[msg.UnitCommand]:
        if self.asked_to_close:
            return []
        self.asked_to_close = True
        return [msg.CloseLifecycle(self.rid)]
