"""What `statetap doctor` prints."""

from __future__ import annotations

from statetap.commands.doctor_report import as_json, print_diagnosis, summary
from statetap.runtime.doctor.findings import Diagnosis, WorkerReport, error, note, ok, warning

SOUND = Diagnosis((WorkerReport("a", "http://127.0.0.1:1", (ok("reachable", "yes"),)),), ())
SICK = Diagnosis(
    (
        WorkerReport("a", "http://127.0.0.1:1", (ok("reachable", "yes"), warning("prefix_cache", "on", "turn it off"))),
        WorkerReport("b", "http://127.0.0.1:2", (error("reachable", "refused [bold]", "start it"), note("dtype", "float32"))),
    ),
    (error("agreement", "a and b differ", "see which is right"),),
)


def test_lines_when_piped(capsys):
    print_diagnosis(SICK)
    assert capsys.readouterr().out.splitlines() == [
        "a: ok: reachable: yes.",
        "a: warning: prefix_cache: on. To fix it: turn it off.",
        "b: error: reachable: refused [bold]. To fix it: start it.",
        "b: note: dtype: float32.",
        "all workers: error: agreement: a and b differ. To fix it: see which is right.",
        "2 workers examined: 2 errors, 1 warning, 1 note",
    ]


def test_tables_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_diagnosis(SICK)
    shown = capsys.readouterr().out
    for text in ("a (http://127.0.0.1:1)", "all workers", "refused [bold]", "→ start it", "2 errors"):
        assert text in shown, text


def test_json_says_whether_all_is_well():
    assert as_json(SOUND) == {
        "ok": True,
        "workers": [
            {
                "worker": "a",
                "url": "http://127.0.0.1:1",
                "findings": ({"check": "reachable", "severity": "ok", "seen": "yes", "fix": ""},),
            }
        ],
        "across": [],
    }
    assert not as_json(SICK)["ok"]


def test_the_last_line_counts():
    assert summary(SOUND) == "1 worker examined: all is well"
