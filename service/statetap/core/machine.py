"""What every state machine of core shares: a transition table, a history, and an error that tells the story."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)
HISTORY_LENGTH = 20


class IllegalTransition(Exception):
    """An event that the machine's table does not allow in its state; `history` holds the last (state, event, next state)."""

    def __init__(self, machine: str, state: str, event: object, history: list[tuple[str, str, str]]) -> None:
        story = "; ".join(f"{before} --{what}--> {after}" for before, what, after in history) or "nothing yet"
        super().__init__(f"{machine}: {event!r} is not allowed in state {state!r}. Before: {story}")
        self.state = state
        self.event = event
        self.history = history


class Machine(Generic[S]):
    """A state and the table of what may follow it: `table[state][event type] = the states it may lead to`."""

    table: Mapping[S, Mapping[type, frozenset[S]]]

    def __init__(self, name: str, state: S) -> None:
        self.name = name
        self.state = state
        self._history: deque[tuple[str, str, str]] = deque(maxlen=HISTORY_LENGTH)

    @property
    def history(self) -> list[tuple[str, str, str]]:
        return list(self._history)

    def require(self, event: object) -> None:
        """Raise IllegalTransition unless the table knows this kind of event in the present state."""
        if type(event) not in self.table[self.state]:
            raise IllegalTransition(self.name, self.state, event, self.history)

    def move(self, event: object, state: S) -> None:
        """Follow the table to `state`, or raise IllegalTransition."""
        if state not in self.table[self.state].get(type(event), frozenset()):
            raise IllegalTransition(self.name, self.state, event, self.history)
        self._history.append((self.state, type(event).__name__, state))
        self.state = state
