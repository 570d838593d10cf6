"""`statetap key`: the key is told once, and its hash is what the configuration takes."""

import hashlib
import json

import pytest
import typer
from statetap.commands.key import key
from statetap.settings import KEY_PATTERN, load_settings
from typer.testing import CliRunner


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(key)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_the_key_alone_goes_to_standard_output(run, tmp_path):
    made = run("trainer", "--scope", "admin")
    assert made.exit_code == 0
    text = made.stdout.strip()
    assert KEY_PATTERN.fullmatch(text)
    table = made.stderr[made.stderr.index("[[keys]]") : made.stderr.index("To whoever")]
    (tmp_path / "statetap.toml").write_text(table)
    (configured,) = load_settings(tmp_path / "statetap.toml").keys
    assert (configured.name, configured.scope) == ("trainer", "admin")
    assert configured.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert text not in made.stderr


def test_a_key_may_only_look_unless_told_otherwise(run):
    made = json.loads(run("trainer", "--json").stdout)
    assert made["scope"] == "read-only"
    assert made["sha256"] == hashlib.sha256(made["key"].encode()).hexdigest()


def test_a_name_that_cannot_be_configured_is_wrong_use(run):
    assert run("my trainer").exit_code == 2
