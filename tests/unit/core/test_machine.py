"""core/machine.py: a state follows the table, and an illegal step tells what came before it."""

from dataclasses import dataclass
from enum import StrEnum

import pytest
from statetap.core.machine import HISTORY_LENGTH, IllegalTransition, Machine


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"


@dataclass(frozen=True)
class Pushed:
    by: str


@dataclass(frozen=True)
class Pulled:
    pass


class DoorMachine(Machine[Door]):
    table = {
        Door.OPEN: {Pushed: frozenset({Door.SHUT})},
        Door.SHUT: {Pulled: frozenset({Door.OPEN, Door.SHUT})},
    }


def test_an_event_of_the_table_moves_the_state():
    door = DoorMachine("front door", Door.OPEN)
    door.move(Pushed("wind"), Door.SHUT)
    door.move(Pulled(), Door.SHUT)
    assert door.state is Door.SHUT
    assert door.history == [("open", "Pushed", "shut"), ("shut", "Pulled", "shut")]


def test_require_knows_what_the_present_state_allows():
    door = DoorMachine("front door", Door.OPEN)
    door.require(Pushed("wind"))
    with pytest.raises(IllegalTransition):
        door.require(Pulled())
    assert door.history == []


def test_an_event_may_not_lead_where_the_table_does_not():
    door = DoorMachine("front door", Door.OPEN)
    with pytest.raises(IllegalTransition):
        door.move(Pushed("wind"), Door.OPEN)
    assert door.state is Door.OPEN


def test_an_illegal_step_tells_its_story():
    door = DoorMachine("front door", Door.OPEN)
    door.move(Pushed("wind"), Door.SHUT)
    with pytest.raises(IllegalTransition) as caught:
        door.move(Pushed("cat"), Door.SHUT)
    assert str(caught.value) == (
        "front door: Pushed(by='cat') is not allowed in state <Door.SHUT: 'shut'>. Before: open --Pushed--> shut"
    )
    assert caught.value.event == Pushed("cat")
    assert caught.value.history == [("open", "Pushed", "shut")]


def test_the_history_keeps_only_the_last_steps():
    door = DoorMachine("front door", Door.OPEN)
    door.move(Pushed("wind"), Door.SHUT)
    for _ in range(HISTORY_LENGTH):
        door.move(Pulled(), Door.SHUT)
    assert door.history == [("shut", "Pulled", "shut")] * HISTORY_LENGTH
