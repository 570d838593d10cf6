"""Every promise of `docs/durability.md` names a test that proves it, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "durability.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises() -> dict[str, list[tuple[str, str]]]:
    """Each row of the page's tables: the promise and the tests, as (file, function), that it names."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row[0]: _NAMED.findall(row[-1]) for row in rows if row[0] != "promise" and not set(row[0]) <= {"-"}}


def test_each_promise_names_a_test() -> None:
    found = promises()
    assert len(found) >= 15
    assert [promise for promise, tests in found.items() if not tests] == []


def test_the_tests_exist() -> None:
    missing = []
    for file, function in sorted({test for tests in promises().values() for test in tests}):
        path = ROOT / file
        defined = {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], []))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if function not in defined:
            missing.append(f"{file}::{function}")
    assert missing == []
