"""The catalogue of events, the page about it and the code are equal."""

import ast
from pathlib import Path

import pytest
from statetap.telemetry import events
from statetap.telemetry.document import log_events_page

ROOT = Path(__file__).parents[3]
SERVICE = ROOT / "service/statetap"
# The embedded worker is a process of its own that imports nothing of the service.
FILES = [
    file
    for file in sorted(SERVICE.rglob("*.py"))
    if SERVICE / "embedded" not in file.parents and file != SERVICE / "telemetry/events.py"
]
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LOGGED_BY_NAME = {f"a{level}" for level in LEVELS} | LEVELS
CONSTANTS = {name: value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}


def log_calls(source):
    """(line, first argument, names of keywords) of every call of a logger's method, whatever the logger is called."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGED_BY_NAME:
            if node.func.attr == "exception" and not node.args:
                continue  # a future's
            event = node.args[0] if node.args else None
            yield node.lineno, event, {keyword.arg for keyword in node.keywords if keyword.arg}


def constant(node):
    """The name X of an expression `events.X`, else None."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "events":
        return node.attr
    return None


def faults(source):
    """What is wrong with the log calls of a file, one line for each."""
    for line, event, fields in log_calls(source):
        name = constant(event)
        if name not in CONSTANTS:
            yield f"line {line}: logs {ast.unparse(event) if event else 'nothing'} instead of an event of the catalogue"
        else:
            unknown = fields - set(events.CATALOGUE[CONSTANTS[name]].fields) - {"exc_info"}
            if unknown:
                yield f"line {line}: {name} has no fields {sorted(unknown)} in the catalogue"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SERVICE)))
def test_every_log_line_is_an_event_of_the_catalogue(file):
    assert list(faults(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "log.info('unit.committed')",
        "self._log.warning(f'{x}')",
        "logging.getLogger('x').error('no')",
        "log.info()",
        "log.info(events.NO_SUCH_EVENT)",
        "log.exception(other.UNIT_COMMITTED)",
        "log.info(events.UNIT_COMMITTED, job='j', colour='red')",
    ],
)
def test_what_is_no_event_of_the_catalogue_is_found(source):
    assert len(list(faults(source))) == 1


def test_a_line_of_the_catalogue_is_fine():
    assert list(faults("log.bind(job='j').info(events.UNIT_COMMITTED, unit=1, **more)")) == []


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_event_of_the_catalogue_is_used(name):
    used = {constant(node) for file in FILES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))}
    assert name in used


def test_the_catalogue_has_every_constant_under_its_name():
    assert sorted(CONSTANTS.values()) == sorted(events.CATALOGUE)
    assert {name.lower() for name in CONSTANTS} == {value.replace(".", "_") for value in events.CATALOGUE}


def test_the_page_is_up_to_date():
    page = (ROOT / "docs/log-events.md").read_text(encoding="utf-8")
    assert page == log_events_page(), "run `make docs`"


def listed(page):
    return [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]


def test_the_page_lists_every_event_of_the_service_and_of_the_embedded_worker():
    service, embedded = log_events_page().split("\n## The embedded worker\n")
    assert listed(service) == list(events.CATALOGUE)
    logged = {
        event.value
        for file in (SERVICE / "embedded").rglob("*.py")
        for _, event, _ in log_calls(file.read_text(encoding="utf-8"))
        if isinstance(event, ast.Constant)
    }
    assert sorted(listed(embedded)) == sorted(logged)
