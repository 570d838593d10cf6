"""A rehearsal of seconds: too short to show growth, long enough for what is not stored, not right or not removed."""

from __future__ import annotations

from pathlib import Path

from tests.rehearsal.rehearsal import Plan, rehearsing

SHORT = Plan(samples=300, median=200, longest=800, hidden=256, workers=3, read_back=0.2, look_seconds=0.1)
# A service that has just started still fills its caches.
TOO_EARLY = "service: "


def test_a_small_job_is_stored_whole_and_every_digest_is_right(tmp_path: Path) -> None:
    with rehearsing(SHORT, tmp_path) as rehearsal:
        rehearsed = rehearsal.run()
    assert [criterion for criterion in rehearsed.short if not criterion.name.startswith(TOO_EARLY)] == []
    assert rehearsed.stored == 300
    assert rehearsed.object_bytes >= rehearsed.nbytes
