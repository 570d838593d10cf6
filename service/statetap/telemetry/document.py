"""The page about log events (`docs/log-events.md`), made from the catalogue."""

from __future__ import annotations

from itertools import groupby

from statetap.telemetry.events import CATALOGUE

_HEAD = """\
# Log events

<!-- Made from service/statetap/telemetry/events.py by `make docs`: change it there. -->

The service logs to standard error: one JSON object a line, or coloured text where that is a terminal (`log.format` chooses).
Every line has `event`, one of the names below, `level` (`debug`, `info`, `warning` or `error`) and `timestamp` (RFC 3339, UTC). A
line has those of its event's other fields that apply. A line about an exception has it under `exception`.

`job`, `dataset` and `rid` are ids, `unit` and `sample` numbers within their job, `worker` a name. Sizes are bytes,
lengths are tokens, durations end in `seconds`.
"""

_READY = "host port dumps model_fingerprint aux_layer_ids final dtype context_length"
_TAIL = f"""
## The embedded worker

`statetap worker` is a process of its own: it writes the same kind of lines to standard output, about itself.

| event | meaning | fields |
|---|---|---|
| `worker.starting` | The model is about to be loaded. | `model_path`, `pid`, `version` |
| `worker.ready` | It answers requests and publishes dumps. | {", ".join(f"`{name}`" for name in _READY.split())} |
| `worker.publish_failed` | A capture could not be published; its request fails. | `rid`, `reason` |
| `worker.stopped` | It has ended; `cut_off_a_pass` says whether a forward pass was cut off. | `cut_off_a_pass` |
| `worker.died` | A fault ended it. | `error` |
"""


def log_events_page() -> str:
    """Markdown: a table for each family of events (`job.*`, `unit.*`, ...)."""
    parts = [_HEAD]
    for family, names in groupby(CATALOGUE, key=lambda name: name.split(".")[0]):
        rows = "\n".join(
            f"| `{name}` | {CATALOGUE[name].meaning} | {', '.join(f'`{f}`' for f in CATALOGUE[name].fields)} |" for name in names
        )
        parts.append(f"\n## {family}\n\n| event | meaning | fields |\n|---|---|---|\n{rows}\n")
    return "".join([*parts, _TAIL])
