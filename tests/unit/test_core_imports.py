"""core/ is pure: it imports pure parts of the standard library and itself, and calls nothing that reaches outside."""

import ast
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[2] / "service"
ALLOWED = {
    "__future__",
    "array",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "re",
    "string",
    "struct",
    "types",
    "typing",
}
REACHING_OUT = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
FILES = sorted((SERVICE / "statetap/core").rglob("*.py"))


def impurities(source):
    """(line, what) of every import beyond the allow-list, wherever it stands, and every use of a name that reaches outside."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, level=0):
                modules = [module]
            case ast.ImportFrom():
                modules = ["a relative import"]
            case ast.Name(id=name) if name in REACHING_OUT:
                modules = [name]
            case _:
                continue
        for module in modules:
            if module not in ALLOWED and not (isinstance(node, ast.ImportFrom) and f"{module}.".startswith("statetap.core.")):
                yield node.lineno, module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_core_is_pure(file):
    assert list(impurities(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import math, time",
        "from os import path",
        "import collections.abc, importlib",
        "def f():\n    from random import random",
        "from statetap.ports import Clock",
        "import statetap.runtime",
        "from . import spec",
        "print('hello')",
        "read = open",
    ],
)
def test_what_is_not_pure_is_found(source):
    assert len(list(impurities(source))) == 1


def test_the_whole_of_core_is_looked_at():
    assert {"machine.py", "placement.py", "spec.py", "worker.py"} <= {file.name for file in FILES}
