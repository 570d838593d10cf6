from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang.beacon import Beacon
from statetap_sglang.format import DumpFormatError

from tests.fakes.dumps import make_beacon


def test_a_beacon_comes_back_as_it_was(tmp_path: Path) -> None:
    for beacon in (make_beacon(), make_beacon(chunked_prefill_size=64, aux_layer_ids=(), radix_cache=True)):
        beacon.write(tmp_path)
        assert Beacon.read(tmp_path) == beacon
    assert [path.name for path in tmp_path.iterdir()] == ["tap.json"]


def test_no_beacon_yet(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Beacon.read(tmp_path)


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    make_beacon().write(tmp_path)
    path = tmp_path / "tap.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new": [1, 2]}))
    assert Beacon.read(tmp_path) == make_beacon()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", 2),
        ("boot_id", "../x"),
        ("boot_id", 7),
        ("dp_rank", -1),
        ("dp_rank", True),
        ("num_layers", 0),
        ("hidden_size", "48"),
        ("vocab_size", 1.5),
        ("context_length", None),
        ("aux_layer_ids", [3, 1]),
        ("aux_layer_ids", [1, 1]),
        ("aux_layer_ids", [1, 8]),
        ("aux_layer_ids", [-1]),
        ("aux_layer_ids", "13"),
        ("aux_layer_ids", [[1]]),
        ("final", "last"),
        ("final", ["both"]),
        ("dtype", "int8"),
        ("dtype", {}),
        ("model_path", ""),
        ("model_fingerprint", "\ud800"),
        ("radix_cache", 1),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", -1),
        ("budget_bytes", 1 << 63),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    make_beacon().write(tmp_path)
    path = tmp_path / "tap.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DumpFormatError, match=key):
        Beacon.read(tmp_path)


def test_a_beacon_that_captures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="anything to capture"):
        make_beacon(aux_layer_ids=(), final="none")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"boot_id": "x"}', " " * (1 << 17), '{"a":1,"a":2}', "[" * 60_000])
def test_what_is_no_beacon_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tap.json").write_text(text)
    with pytest.raises(DumpFormatError):
        Beacon.read(tmp_path)


def test_a_beacon_is_a_file(tmp_path: Path) -> None:
    make_beacon().write(tmp_path)
    (tmp_path / "tap.json").rename(tmp_path / "elsewhere")
    (tmp_path / "tap.json").symlink_to("elsewhere")
    with pytest.raises(DumpFormatError, match="symbolic link"):
        Beacon.read(tmp_path)
    (tmp_path / "tap.json").unlink()
    os.mkfifo(tmp_path / "tap.json")
    with pytest.raises(DumpFormatError, match="not a regular file"):
        Beacon.read(tmp_path)
