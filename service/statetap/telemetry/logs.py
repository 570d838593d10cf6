"""How log lines look: one JSON object a line, or coloured text on a terminal; always to one stream, always with `timestamp`,
`level` and `event`. What other libraries log goes the same way, as `library.logged`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import orjson
import structlog
from structlog.typing import Processor

from statetap.telemetry import events


def configure(
    log_format: Literal["auto", "json", "console"] = "auto", level: str = "info", *, stream: TextIO | None = None
) -> None:
    """Send every log line of the process to `stream` (default: stderr). `level` is `debug`, `info`, `warning` or `error`."""
    stream = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    render: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _as_library_line],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    # Other libraries' chatter below a warning is theirs to know, unless somebody asked for everything.
    logging.basicConfig(handlers=[handler], level=threshold if level == "debug" else max(threshold, logging.WARNING), force=True)
    logging.captureWarnings(True)


def _as_library_line(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record: logging.LogRecord = line["_record"]
    line.update(message=line["event"], event=events.LIBRARY_LOGGED, logger=record.name)
    return line


def _json(line: Any, **_options: Any) -> str:
    return orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
