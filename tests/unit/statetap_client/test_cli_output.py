"""Numbers for people, and progress on a terminal and off it."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console
from statetap_client.output import duration, print_job, print_table, sample_counts, size
from statetap_client.progress import ProgressLines, display, shown_progress
from statetap_client.schemas import Job, LayerNorms, Progress, SampleCounts


def job(state: str = "running", *, stored: int = 3, failed: int = 0, eta_seconds: float | None = 60.0) -> Job:
    counts = SampleCounts(total=5, pending=5 - stored - failed, stored=stored, failed=failed, cancelled=0, skipped=0)
    return Job(
        id="job1",
        name="night run",
        state=state,
        priority=0,
        dataset="ds1",
        store="s.zarr",
        model_path="org/model",
        model_fingerprint="f",
        aux_layer_ids=[1],
        final="none",
        dtype="bfloat16",
        identity="tokens",
        progress=Progress(
            samples=counts,
            tokens_total=100,
            tokens_stored=60,
            bytes_total=1000,
            bytes_stored=600,
            units_total=1,
            units_committed=0,
            tokens_per_second=1234.5,
            bytes_per_second=5.7e6,
            eta_seconds=eta_seconds,
        ),
        failures={"non-finite states": failed} if failed else {},
        workers={"gpu-0": {"stored": stored, "attempts": 4, "lost": 1}},
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        started_at=None,
        finished_at=None,
    )


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (5_688_576, "5.7 MB"), (2e12, "2.0 TB"), (7e17, "700.0 PB")],
)
def test_sizes(nbytes: float, told: str) -> None:
    assert size(nbytes) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, "unknown"), (0.4, "0 s"), (59.6, "1 min 0 s"), (61, "1 min 1 s"), (3_725, "1 h 2 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds: float | None, told: str) -> None:
    assert duration(seconds) == told


def test_only_what_there_is_is_counted() -> None:
    assert sample_counts(job()) == "3 of 5 stored"
    assert sample_counts(job(failed=2)) == "3 of 5 stored, 2 failed"


def test_lines_come_at_changes_of_state_and_now_and_then() -> None:
    written, now = io.StringIO(), 100.0
    lines = ProgressLines(Console(file=written), monotonic=lambda: now)
    lines(job())
    now += 4
    lines(job(stored=4))
    now += 1
    lines(job(stored=4))
    lines(job("completed", stored=5, eta_seconds=None))
    assert written.getvalue().splitlines() == [
        "job1 running: 3 of 5 stored; 1,234 tokens/s, 5.7 MB/s, 1 min 0 s left",
        "job1 running: 4 of 5 stored; 1,234 tokens/s, 5.7 MB/s, 1 min 0 s left",
        "job1 completed: 5 of 5 stored; 1,234 tokens/s, 5.7 MB/s",
    ]


def test_the_norms_of_a_job_are_a_table_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    norms = {
        "aux_hidden_states": [
            LayerNorms(layer=1, rows="first", count=1000, min=411.5, mean=415.26, max=12345.6),
            LayerNorms(layer=1, rows="later", count=16000, min=0.00123456, mean=15, max=31),
        ],
        "last_hidden_states": [LayerNorms(layer=None, rows="later", count=3, min=1, mean=2, max=1e20)],
    }
    print_job(job().model_copy(update={"layer_norms": norms}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t") for line in lines[-5:]] == [
        [""],
        ["norms of", "layer", "rows", "sampled", "min", "mean", "max"],
        ["aux_hidden_states", "1", "first", "1,000", "411.5", "415.3", "1.235e+04"],
        ["aux_hidden_states", "1", "later", "16,000", "0.001235", "15", "31"],
        ["last_hidden_states", "", "later", "3", "1", "2", "1e+20"],
    ]


def test_a_job_without_norms_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_job(job())
    assert "norms" not in capsys.readouterr().out


def test_a_terminal_shows_it_all() -> None:
    written = io.StringIO()
    Console(file=written, width=120).print(display(job(failed=1)))
    for told in ("night run", "running", "3 of 5 stored, 1 failed", "1,234 tokens/s", "non-finite states: 1", "gpu-0: 3 stored"):
        assert told in written.getvalue()


def test_the_display_is_for_terminals() -> None:
    written = io.StringIO()
    with shown_progress(Console(file=written, force_terminal=True, width=100)) as show:
        show(job())
    assert "\x1b[" in written.getvalue()
    piped = io.StringIO()
    with shown_progress(Console(file=piped)) as show:
        show(job())
    assert "\x1b[" not in piped.getvalue()


def test_a_table_on_a_terminal_is_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("name",), [("[red]plain[/red]",)])
    assert "[red]plain[/red]" in capsys.readouterr().out
