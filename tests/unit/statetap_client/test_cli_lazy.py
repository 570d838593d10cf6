"""Commands are listed without being imported, whoever brings them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from statetap_client import lazy
from statetap_client.cli import Commands, app
from typer.testing import CliRunner

SOURCE = '''
"""A module that brings a command."""

raise_if_imported

def bring(count: int = 1) -> None:
    """Bring something along. It takes a count.

    More of it.
    """
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "brought_along.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def added(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("bring", "brought_along:bring", lazy.ENTRY_POINT_GROUP),
        EntryPoint("jobs", "brought_along:bring", lazy.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(lazy, "entry_points", lambda group: points)


@pytest.mark.usefixtures("added")
def test_added_commands_are_listed_by_their_docstrings_and_not_imported() -> None:
    ran = CliRunner().invoke(app, ["--help"])
    assert ran.exit_code == 0
    assert "Bring something along." in ran.output
    assert "takes a count" not in ran.output
    assert "brought_along" not in sys.modules
    lazy._source.cache_clear()


@pytest.mark.usefixtures("added")
def test_the_clients_own_commands_cannot_be_taken_over() -> None:
    assert lazy.summary("brought_along:bring") not in CliRunner().invoke(app, ["jobs", "--help"]).output


@pytest.mark.usefixtures("added")
def test_an_added_command_runs(module: Path) -> None:
    module.write_text(SOURCE.replace("raise_if_imported", "import typer") + '    typer.echo("brought " * count)\n')
    ran = CliRunner().invoke(app, ["bring", "--count", "2"])
    assert (ran.exit_code, ran.output) == (0, "brought brought \n")
    assert "It takes a count" in CliRunner().invoke(app, ["bring", "--help"]).output
    del sys.modules["brought_along"]


def test_a_client_alone_has_its_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "entry_points", lambda group: [])
    ran = CliRunner().invoke(app, ["--help"])
    assert ran.exit_code == 0
    assert next(iter(Commands.own)) in ran.output


@pytest.mark.parametrize("name", Commands.own)
def test_every_command_has_help(name: str) -> None:
    assert lazy.summary(Commands.own[name]).endswith(".")
    ran = CliRunner().invoke(app, [name, "--help"])
    assert ran.exit_code == 0
    assert "Usage: " in ran.output


def test_help_imports_nothing_heavy() -> None:
    heavy = {"httpx", "pydantic", "zarr", "numpy", "torch", "statetap.settings", "statetap_client.schemas"}
    script = f"""
import sys
sys.argv = ["statetap", "--help"]
from statetap_client.cli import main
try:
    main()
except SystemExit as exited:
    assert exited.code in (0, None), exited.code
sys.stderr.write(" ".join(sorted({heavy!r} & set(sys.modules))))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stderr.split() == []
    assert "submit" in ran.stdout
