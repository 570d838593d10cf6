"""`python -m tests.chaos.killable PLAN serve …`: the service, which kills itself at a persisted step that a file names.

The plan is read anew at every step, so that one process can be told at any time: `{"step": …, "when": "before" or "after",
"call": n}`; the n-th call since the plan was written. On SIGUSR1 the names of all running tasks are written beside it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STEPS: Mapping[str, tuple[str, str]] = {
    "plan a job": ("statetap.adapters.ledger.ledger:SqlLedger", "add_job"),
    "prepare the store": ("statetap.adapters.store.zarr_store:ZarrStore", "prepare"),
    "write tokens": ("statetap.adapters.store.zarr_store:ZarrStore", "write_tokens"),
    "lease": ("statetap.adapters.ledger.ledger:SqlLedger", "lease_unit"),
    "record an answer": ("statetap.adapters.ledger.answer_journal:FileAnswerJournal", "record"),
    "write a shard object": ("statetap.adapters.store.local_shard_writer:_Attempt", "_write_temporary"),
    "publish a shard object": ("statetap.adapters.store.local_shard_writer:_Attempt", "_publish"),
    "commit": ("statetap.adapters.ledger.ledger:SqlLedger", "commit_unit"),
    "forget the answers": ("statetap.adapters.ledger.answer_journal:FileAnswerJournal", "forget"),
    "release a dump": ("statetap.adapters.dumps.held:HeldDump", "release"),
    "project": ("statetap.adapters.store.zarr_store:ZarrStore", "write_samples"),
    "end the job": ("statetap.adapters.ledger.ledger:SqlLedger", "set_job_state"),
}


class Plan:
    """The file that says where to die; without it, nothing happens."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = b""
        self._calls: Counter[str] = Counter()
        self._counting = threading.Lock()

    def reached(self, step: str, when: str) -> None:
        """Die here, if this is the place."""
        try:
            text = self._path.read_bytes()
        except OSError:
            # There is none, or no descriptor is free for it: that is a fault of its own, and not one of every step.
            return
        with self._counting:
            if text != self._text:
                self._text = text
                self._calls.clear()
            wanted = json.loads(text)
            if wanted["step"] == step and wanted["when"] == when:
                self._calls[step] += 1
                if self._calls[step] == wanted["call"]:
                    os.kill(os.getpid(), signal.SIGKILL)


def _wrap(step: str, method: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def async_step(*args: Any, **kwargs: Any) -> Any:
            plan.reached(step, "before")
            result = await method(*args, **kwargs)
            plan.reached(step, "after")
            return result

        return async_step

    @functools.wraps(method)
    def plain_step(*args: Any, **kwargs: Any) -> Any:
        plan.reached(step, "before")
        result = method(*args, **kwargs)
        plan.reached(step, "after")
        return result

    return plain_step


def _telling_its_tasks(serve: Callable[..., Any], told: Path) -> Callable[..., Any]:
    def tell() -> None:
        unpublished = told.with_suffix(".unfinished")
        unpublished.write_text(json.dumps([task.get_coro().__qualname__ for task in asyncio.all_tasks()]))
        unpublished.replace(told)

    @functools.wraps(serve)
    async def telling(*args: Any, **kwargs: Any) -> Any:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
        await serve(*args, **kwargs)

    return telling


def arm(plan_file: Path) -> None:
    """Wrap every step, and the service itself."""
    plan = Plan(plan_file)
    for step, (where, name) in STEPS.items():
        module, _, kind = where.partition(":")
        owner = getattr(__import__(module, fromlist=[kind]), kind)
        setattr(owner, name, _wrap(step, getattr(owner, name), plan))
    from statetap import main

    main.serve = _telling_its_tasks(main.serve, plan_file.with_suffix(".tasks"))


if __name__ == "__main__":
    arm(Path(sys.argv.pop(1)))
    from statetap_client.cli import main as command_line

    command_line()
