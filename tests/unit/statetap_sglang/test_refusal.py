from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang.format import DumpFormatError
from statetap_sglang.refusal import Refusal
from statetap_sglang.tap import remove_dead_tap


def test_a_refusal_comes_back_as_it_was(tmp_path: Path) -> None:
    refusal = Refusal("pipeline parallelism: …", "0.1.0", "0.5.23")
    refusal.write(tmp_path)
    assert Refusal.read(tmp_path) == refusal
    assert [path.name for path in tmp_path.iterdir()] == ["refused.json"]


def test_a_reason_of_any_text_can_be_written(tmp_path: Path) -> None:
    Refusal("\ud800" * 100_000, "0.1.0", "0.5.23").write(tmp_path)
    assert len(Refusal.read(tmp_path).reason) == 4000


def test_no_refusal_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Refusal.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2"),
        ({"reason": None}, "must be strings"),
        ({"plugin_version": 1}, "must be strings"),
    ],
)
def test_what_is_no_refusal_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    found = {"format_version": 1, "reason": "why", "plugin_version": "0.1.0", "sglang_version": "0.5.23"} | changes
    (tmp_path / "refused.json").write_text(json.dumps(found))
    with pytest.raises(DumpFormatError, match=message):
        Refusal.read(tmp_path)


def test_a_dead_tap_that_refused_leaves_nothing(tmp_path: Path) -> None:
    tap = tmp_path / "boot-0"
    tap.mkdir(mode=0o700)
    Refusal("why", "0.1.0", "0.5.23").write(tap)
    assert remove_dead_tap(tap)
    assert not tap.exists()
