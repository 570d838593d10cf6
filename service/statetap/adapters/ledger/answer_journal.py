"""The answers of units that are open: one small file a unit, open while it is appended to, gone with the commit.

Not synced: a kill of the service loses nothing that was written, and after a crash of the machine the dumps, which lie in
shared memory, are gone as well.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import orjson

from statetap.ports import RecordedAnswer


class FileAnswerJournal:
    """Implements the port `AnswerJournal` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        # To open a file takes longer than to append a line.
        self._open: dict[tuple[str, int], int] = {}

    def record(self, job: str, unit: int, answer: RecordedAnswer) -> None:
        line = orjson.dumps([answer.rid, answer.sample, answer.worker, answer.next_token]) + b"\n"
        journal = self._open.get((job, unit))
        if journal is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            journal = self._open[job, unit] = os.open(self._path(job, unit), flags, 0o666)
        os.write(journal, line)

    def recall(self, job: str, unit: int) -> list[RecordedAnswer]:
        """The answers on record. A line that a kill or a full disk cut off does not count, nor does what was appended to it."""
        try:
            lines = self._path(job, unit).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        answers = []
        for line in lines:
            with suppress(orjson.JSONDecodeError, TypeError):
                answers.append(RecordedAnswer(*orjson.loads(line)))
        return answers

    def forget(self, job: str, unit: int) -> None:
        if (journal := self._open.pop((job, unit), None)) is not None:
            os.close(journal)
        self._path(job, unit).unlink(missing_ok=True)

    def keep_only(self, units: Collection[tuple[str, int]]) -> None:
        for job, unit in self._open.keys() - set(units):
            self.forget(job, unit)
        kept = {self._path(job, unit) for job, unit in units}
        for journal in self._folder.glob("*.ndjson"):
            if journal not in kept:
                journal.unlink(missing_ok=True)

    def _path(self, job: str, unit: int) -> Path:
        return self._folder / f"{job}-{unit}.ndjson"
