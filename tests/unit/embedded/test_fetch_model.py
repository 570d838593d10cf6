from __future__ import annotations

from pathlib import Path

import pytest

from tools.fetch_model import main, make


def test_the_tiny_model_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "models" / "tiny"
    main(["--tiny", str(directory)])
    made = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert {"config.json", "model.safetensors"} <= made.keys()
    main(["--tiny", str(directory)])
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == made
    assert capsys.readouterr().out.splitlines() == [f"{directory}: made", f"{directory}: was there already"]


def test_a_model_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_whoever_is_second_leaves_the_firsts_model(tmp_path: Path) -> None:
    directory = tmp_path / "model"

    def overtaken(scratch: Path) -> None:
        (scratch / "config.json").write_text("second")
        directory.mkdir()
        (directory / "config.json").write_text("first")

    assert not make(directory, overtaken)
    assert (directory / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [directory]


def test_a_directory_that_is_no_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(SystemExit, match="holds no model"):
        make(tmp_path / "mine", lambda _: None)
