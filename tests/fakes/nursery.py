"""Starts processes from one that has imported everything already: torch, transformers and zarr cost seconds at each start.

What comes out is a process of its own, which runs `python -m <module> <arguments>` from its first line: only the imports are
shared. The nursery is one process for a test run; it is started when the first child is wanted and ends with the run.
`python -m tests.fakes.nursery` is that process: a line of JSON in, a line out.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from statetap.commands.children import Child

PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).resolve().parents[2]
# What `statetap.embedded` and `statetap serve` import in their first seconds.
IMPORTED = ("statetap.embedded.server", "transformers.models.llama.modeling_llama", "statetap.main", "statetap.commands.serve")


class ForkedProcess:
    """A process that the nursery has made, with what `subprocess.Popen` has for the like."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], timeout)[0]:
            self.returncode = int(self._nursery.ask({"reap": self.pid}))
            os.close(self._descriptor)
        return self.returncode


class Nursery:
    """The side of the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.close)

    def start(self, module: str, arguments: Sequence[str], log_file: Path) -> ForkedProcess:
        """Start `python -m <module> <arguments>`, its output in `log_file`, in the folder and environment of this one."""
        order: dict[str, Any] = {"module": module, "arguments": list(arguments), "log": str(log_file), "folder": str(Path.cwd())}
        order["environment"] = dict(os.environ)
        return ForkedProcess(self, int(self.ask(order)))

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def nursery() -> Nursery:
    return Nursery()


class NurseryChild(Child):
    """A `Child` from the nursery."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        log_file.touch()
        self._process = nursery().start(module, arguments, log_file)  # as good as a Popen


def main() -> None:
    for module in IMPORTED:
        __import__(module)
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _become(**order)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _become(module: str, arguments: list[str], log: str, folder: str, environment: dict[str, str]) -> NoReturn:
    """Be the process that was asked for, and end with the nursery, should a test run be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(descriptor, target)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
