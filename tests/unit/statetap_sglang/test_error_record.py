from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.format import DumpFormatError


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "req_1.error.json"
    path.write_bytes(ErrorRecord("rid", "why", 3).encode())
    assert ErrorRecord.read(path) == ErrorRecord("rid", "why", 3)


@pytest.mark.parametrize(
    "change", [{"format_version": 2}, {"rid": 1}, {"reason": None}, {"lost": 0}, {"lost": True}, {"lost": "1"}]
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "req_1.error.json"
    path.write_text(json.dumps({"format_version": 1, "rid": "rid", "reason": "why", "lost": 1} | change))
    with pytest.raises(DumpFormatError, match=next(iter(change))):
        ErrorRecord.read(path)
