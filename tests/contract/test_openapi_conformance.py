"""A few examples of every operation of the OpenAPI document, against a real service. More by hand: `make conformance`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.conformance import conforms


@pytest.mark.timeout(600)
def test_every_answer_is_as_the_document_says(tmp_path: Path) -> None:
    ran = conforms(tmp_path, examples=3, max_seconds=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Tested: 21" in ran.stdout
