from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.format import DumpFormatError
from statetap_sglang.publisher import DumpPublisher, PublishError

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors


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


def test_a_dump_that_can_never_fit_is_told_from_one_that_has_no_room_now(tmp_path: Path) -> None:
    publisher = DumpPublisher(tmp_path / "dumps", "worker", make_beacon(budget_bytes=100))
    with pytest.raises(PublishError, match="does not fit a budget of 100; raise the budget") as refused:
        publisher.publish(make_metadata("rid", 37), make_tensors(make_beacon(), 37))
    publisher.close()
    assert not ErrorRecord("rid", refused.value.reason).is_for_want_of_room
