"""`statetap compact`, from outside."""

import json
import re

import numpy as np
import pytest
from rich.console import Console
from statetap.core.placement import Geometry
from statetap_client import commands_compact, layout
from statetap_client.cli import app
from statetap_client.progress import LINE_SECONDS
from typer.testing import CliRunner

from tests.fakes.store_on_disk import LAST, hidden_arrays, random_rows, write_store

GEOMETRY = Geometry(rows_per_shard=512, rows_per_chunk=256, alignment=2)


@pytest.fixture
def source(tmp_path):
    arrays, rng = hidden_arrays("bfloat16", layers=2, hidden=64), np.random.default_rng(0)
    samples = [{array.name: random_rows(array, length, rng) for array in arrays} for length in (500, 900)]
    write_store(tmp_path / "s", arrays, samples, geometry=GEOMETRY)
    return tmp_path / "s"


def run(*arguments):
    return CliRunner().invoke(app, ["compact", *map(str, arguments)])


def test_it_tells_both_sizes_and_the_ratio_and_verify_passes(source, tmp_path):
    ran = run(source, tmp_path / "c")
    assert ran.exit_code == 0
    sizes = [int(found) for found in re.findall(r"\((\d+) bytes\)", ran.stdout)]
    ratio = float(re.search(r"ratio: (\S+);", ran.stdout)[1])
    assert sizes[1] / sizes[0] == pytest.approx(ratio, abs=1e-3)
    assert 0.6 < ratio < 0.9
    assert "2 stored samples, every digest verified" in ran.stdout
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "c"), "--json"])
    assert verified.exit_code == 0
    assert json.loads(verified.stdout)["digests"]["checked"] == 2


def test_as_json(source, tmp_path):
    ran = run(source, tmp_path / "c", "--json", "--threads", "1")
    found = json.loads(ran.stdout)
    assert ran.exit_code == 0
    assert found["samples"] == 2
    assert found["target_bytes"] / found["source_bytes"] == found["ratio"]


def test_a_corrupt_sample_fails_by_name(source, tmp_path):
    path = source / layout.shard_key(LAST, 0, (64,))
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    ran = run(source, tmp_path / "c")
    assert ran.exit_code == 1
    assert "not compacted: sample 0 (id 'sample-0')" in ran.stderr
    assert not (tmp_path / "c").exists()


def test_a_target_that_exists_fails(source, tmp_path):
    (tmp_path / "c").mkdir()
    ran = run(source, tmp_path / "c")
    assert ran.exit_code == 1
    assert "exists already" in ran.stderr


def test_what_is_no_store_is_wrong_usage(tmp_path):
    assert run(tmp_path, tmp_path / "c").exit_code == 2


def test_a_bar_on_a_terminal(source, tmp_path, monkeypatch):
    monkeypatch.setattr(commands_compact, "Console", lambda stderr: Console(force_terminal=True, stderr=stderr))
    ran = run(source, tmp_path / "c")
    assert ran.exit_code == 0
    assert "compacting" in ran.stderr


def test_a_line_every_few_seconds_where_it_is_piped():
    now, lines = [0.0], []
    advance = commands_compact._lines(lines.append, lambda: now[0])
    for now[0], done in ((1.0, 10), (LINE_SECONDS, 20), (LINE_SECONDS + 1, 30), (2 * LINE_SECONDS, 40)):
        advance(done, 100)
    assert lines == ["compacting: 20 B of 100 B", "compacting: 40 B of 100 B"]
