"""How log lines look, each in a process of its own: logging is set up for a whole process."""

import json
import subprocess
import sys
from datetime import datetime, timedelta

PROGRAM = """
import logging, sys, warnings
from pathlib import Path
import structlog
from statetap.telemetry import events, logs

log = structlog.get_logger()
logs.configure(*sys.argv[1:])
log.info(events.UNIT_COMMITTED, job="j1", unit=3, path=Path("/x"))
log.debug(events.DUMP_STRAY)
try:
    {}["nothing"]
except KeyError:
    log.exception(events.API_REQUEST_FAILED, method="GET")
logging.getLogger("aiohttp.access").info("chatter")
logging.getLogger("aiohttp.server").error("broke %s", "it")
warnings.warn("careful")
"""


def lines(*arguments):
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_where_there_is_no_terminal_every_line_is_a_json_object():
    committed, failed, library, warned = map(json.loads, lines("auto"))
    stamp = datetime.fromisoformat(committed.pop("timestamp"))
    assert stamp.utcoffset() == timedelta(0)
    assert committed == {"event": "unit.committed", "level": "info", "job": "j1", "unit": 3, "path": "/x"}
    assert (failed["event"], failed["level"], failed["method"]) == ("api.request_failed", "error", "GET")
    assert failed["exception"].endswith("KeyError: 'nothing'")
    assert (library["event"], library["level"], library["message"]) == ("library.logged", "error", "broke it")
    assert library["logger"] == "aiohttp.server"
    assert "UserWarning: careful" in warned["message"]
    assert {"timestamp", "event", "level"} <= failed.keys() & library.keys() & warned.keys()


def test_the_level_decides_what_is_shown():
    assert [json.loads(line)["event"] for line in lines("json", "error")] == ["api.request_failed", "library.logged"]
    shown = [json.loads(line) for line in lines("json", "debug")]
    assert "dump.stray" in [line["event"] for line in shown]
    assert "chatter" in [line.get("message") for line in shown]


def test_text_for_people_is_on_one_line_and_without_colour_where_there_is_no_terminal():
    first = lines("console")[0]
    assert "unit.committed" in first
    assert "job=j1" in first
    assert "\x1b" not in first
