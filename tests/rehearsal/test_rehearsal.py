"""A rehearsal of seconds: too short to show growth, long enough for what is not stored, not right or not removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.rehearsal.rehearsal import Plan, rehearsing
from tests.rehearsal.workers import PlacedStates

SHORT = Plan(samples=300, median=200, longest=800, hidden=256, workers=3, every=1, look_seconds=0.1)
# A service that has just started still fills its caches.
TOO_EARLY = "service: "


def test_a_small_job_is_stored_whole_and_every_digest_is_right(tmp_path: Path) -> None:
    with rehearsing(SHORT, tmp_path) as rehearsal:
        rehearsed = rehearsal.run()
    assert [criterion for criterion in rehearsed.short if not criterion.name.startswith(TOO_EARLY)] == []
    assert rehearsed.stored == 300
    assert rehearsed.object_bytes >= rehearsed.nbytes


def test_what_is_not_read_back_need_not_be_written(tmp_path: Path) -> None:
    """Six shards or so, of which every third is a hole."""
    with rehearsing(replace(SHORT, samples=200, median=400, hidden=2048, every=3, null=True), tmp_path) as rehearsal:
        rehearsed = rehearsal.run()
    assert [criterion for criterion in rehearsed.short if not criterion.name.startswith(TOO_EARLY)] == []
    assert 0 < rehearsed.read_back < rehearsed.stored == 200
    assert rehearsed.object_bytes >= rehearsed.nbytes


def test_rows_of_another_place_do_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are processes of their own: only what is expected moves, by one row."""
    place = PlacedStates.first_row
    monkeypatch.setattr(PlacedStates, "first_row", lambda self, tokens: place(self, tokens) + 1)
    with rehearsing(replace(SHORT, samples=20), tmp_path) as rehearsal:
        rehearsed = rehearsal.run()
    assert len(rehearsed.wrong_records) == 20
    assert len(rehearsed.wrong_bytes) == 20 * 2  # of each hidden array
