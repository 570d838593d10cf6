"""Processes that a command starts and ends: each writes to a log file, and is ready once a line of it says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
STOP_SECONDS = 40.0
TAIL_LINES = 15


class ChildFailed(Exception):
    """A process that ended, or did not become ready in time; the message holds the end of its log."""


class Child:
    """`python -m <module> <arguments>`, its output in `log_file`."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        with log_file.open("wb") as log:
            command = [sys.executable, "-m", module, *arguments]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - ours

    def wait_for(self, event: str, timeout_seconds: float, *, times: int = 1) -> Mapping[str, Any]:
        """The first log line of that event, once it was logged so many times.

        Raises:
            ChildFailed: the process ended, or did not log it in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            if len(lines := self.lines_of(event)) >= times:
                return lines[0]
            if ended:
                raise ChildFailed(self._story(f"ended with code {self._process.returncode} before {event!r}"))
            time.sleep(POLL_SECONDS)
        raise ChildFailed(self._story(f"did not log {event!r} within {timeout_seconds:g} s"))

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def lines_of(self, event: str) -> list[dict[str, Any]]:
        """All log lines of an event, so far."""
        lines = (line for line in self._lines() if f'"{event}"' in line and line.startswith("{") and line.endswith("}"))
        return [fields for line in lines if (fields := json.loads(line)).get("event") == event]

    def _lines(self) -> list[str]:
        return self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()

    def _story(self, what: str) -> str:
        return "\n".join([f"{self.name} {what}; the end of {self.log_file}:", *self._lines()[-TAIL_LINES:]])
