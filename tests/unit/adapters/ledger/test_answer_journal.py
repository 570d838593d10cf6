"""The journal of answers on disk."""

import pytest
from statetap.adapters.ledger.answer_journal import FileAnswerJournal
from statetap.ports import RecordedAnswer

FIRST = RecordedAnswer("st-j-3-0-1-1", 0, "a", 17)
SECOND = RecordedAnswer("st-j-3-1-1-1", 1, "wörker \n", -1)


@pytest.fixture
def journal(tmp_path):
    return FileAnswerJournal(tmp_path / "answers")


def test_what_was_recorded_is_recalled_by_another_service_in_order(journal, tmp_path):
    journal.record("j", 3, FIRST)
    journal.record("j", 3, SECOND)
    assert FileAnswerJournal(tmp_path / "answers").recall("j", 3) == [FIRST, SECOND]


def test_units_and_jobs_are_apart(journal):
    journal.record("j", 3, FIRST)
    assert journal.recall("j", 4) == journal.recall("k", 3) == []


def test_what_was_forgotten_is_gone_and_may_be_forgotten_again(journal, tmp_path):
    journal.record("j", 3, FIRST)
    journal.forget("j", 3)
    journal.forget("j", 3)
    assert journal.recall("j", 3) == []
    assert list((tmp_path / "answers").iterdir()) == []


def test_a_torn_last_line_does_not_count(journal, tmp_path):
    journal.record("j", 3, FIRST)
    (path,) = (tmp_path / "answers").iterdir()
    with path.open("ab") as file:
        file.write(b'["st-j-3-1-1-1",1,"a"')
    assert journal.recall("j", 3) == [FIRST]
    journal.record("j", 3, FIRST)
    journal.record("j", 3, SECOND)
    assert journal.recall("j", 3) == [FIRST, SECOND], "what is appended to it is lost with it, and no more"


def test_the_folder_is_nobody_elses(journal, tmp_path):
    assert (tmp_path / "answers").stat().st_mode & 0o777 == 0o700


def test_only_the_answers_of_open_units_are_kept(journal, tmp_path):
    for job, unit in (("j", 3), ("j", 4), ("k", 3)):
        journal.record(job, unit, FIRST)
    journal.keep_only([("j", 3), ("gone", 1)])
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["j-3.ndjson"]
    assert journal.recall("j", 3) == [FIRST]
