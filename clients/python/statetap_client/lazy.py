"""Commands that are imported when they are called, and not before: `statetap --help` must not wait for what it lists.

A command's line in the list is the first sentence of its docstring, read from its source.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

ENTRY_POINT_GROUP = "statetap.commands"


class LazyCommand(TyperCommand):
    """Stands for the command at `target`, `module:name` of a function or of a Typer application."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, help=summary(target))
        self._target = target

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self._load().make_context(*args, **extra)

    def _load(self) -> Any:
        module, _, attribute = self._target.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return get_group(found)
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(found)
        return get_command(alone)


class LazyGroup(TyperGroup):
    """The client's commands, and those that other distributions add through the entry-point group `statetap.commands`."""

    own: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self._targets())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        target = self._targets().get(cmd_name)
        return None if target is None else LazyCommand(cmd_name, target)

    def _targets(self) -> dict[str, str]:
        added = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        return {**self.own, **{name: target for name, target in added.items() if name not in self.own}}


def summary(target: str) -> str:
    """The first sentence of the docstring of `target`'s function, or of its module where that defines no such function."""
    module, _, attribute = target.partition(":")
    tree = _source(module)
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    described = next((node for node in functions if node.name == attribute), tree)
    sentence, _, _ = " ".join((ast.get_docstring(described) or "").split()).partition(". ")
    return sentence if not sentence or sentence.endswith(".") else f"{sentence}."


@cache
def _source(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ast.Module([], [])
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
