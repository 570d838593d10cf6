from __future__ import annotations

import os
from pathlib import Path

import pytest
from statetap.adapters.datasets import paths
from statetap.adapters.datasets.paths import open_below
from statetap.ports import DatasetRefused


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "data.jsonl").write_bytes(b"inside")
    (tmp_path / "secret.jsonl").write_bytes(b"outside")
    return root


@pytest.mark.parametrize("absolute", [True, False])
def test_a_file_below_a_root_is_opened(root, absolute):
    with open_below(str(root / "data.jsonl") if absolute else "data.jsonl", [root]) as file:
        assert file.read() == b"inside"


def test_a_link_may_lead_from_root_to_root(root, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "link.jsonl").symlink_to(root / "data.jsonl")
    with open_below("link.jsonl", [other, root]) as file:
        assert file.read() == b"inside"


def test_a_root_may_itself_be_a_link(root, tmp_path):
    (tmp_path / "alias").symlink_to(root)
    with open_below(str(tmp_path / "alias" / "data.jsonl"), [tmp_path / "alias"]) as file:
        assert file.read() == b"inside"


@pytest.mark.parametrize(
    "path", ["../secret.jsonl", "link.jsonl", "folder/secret.jsonl", "missing.jsonl", "loop.jsonl", "nul\0.jsonl"]
)
def test_what_is_outside_or_missing_is_refused_in_the_same_words(root, tmp_path, path):
    (root / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (root / "folder").symlink_to(tmp_path)
    (root / "loop.jsonl").symlink_to(root / "loop.jsonl")
    with pytest.raises(DatasetRefused, match="there is no file"):
        open_below(path, [root])


def test_an_absolute_path_outside_is_refused(root, tmp_path):
    with pytest.raises(DatasetRefused, match="there is no file"):
        open_below(str(tmp_path / "secret.jsonl"), [root])


def test_only_regular_files_are_read(root):
    os.mkfifo(root / "fifo.jsonl")
    (root / "folder.jsonl").mkdir()
    for name in ("fifo.jsonl", "folder.jsonl"):
        with pytest.raises(DatasetRefused, match="not a regular file"):
            open_below(name, [root])


def test_other_kinds_of_file_are_refused(root):
    (root / "data.parquet").touch()
    with pytest.raises(DatasetRefused, match=r"not one of \.ndjson"):
        open_below("data.parquet", [root])


def test_without_a_root_nothing_is_read(root):
    with pytest.raises(DatasetRefused, match="no dataset root"):
        open_below(str(root / "data.jsonl"), [])


@pytest.mark.parametrize("swapped", ["folder", "folder/deeper", "folder/deeper/data.jsonl"])
def test_a_link_that_is_put_there_after_the_look_is_not_followed(root, tmp_path, monkeypatch, swapped):
    """Whoever may write below a root could otherwise have the service read what they may not."""
    inside, outside = root / "folder/deeper", tmp_path / "outside/deeper"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        (folder / "data.jsonl").write_bytes(folder.parent.name.encode())
    resolve = paths._resolve

    def look_and_swap(base, path):
        found = resolve(base, path)
        (root / swapped).rename(tmp_path / "aside")
        (root / swapped).symlink_to(tmp_path / "outside" / Path(swapped).relative_to("folder"))
        return found

    assert open_below("folder/deeper/data.jsonl", [root]).read() == b"folder"
    monkeypatch.setattr(paths, "_resolve", look_and_swap)
    with pytest.raises(DatasetRefused, match="cannot be read"):
        open_below("folder/deeper/data.jsonl", [root])


def test_no_descriptor_is_left_open(root):
    before = len(list(Path("/proc/self/fd").iterdir()))
    open_below("data.jsonl", [root]).close()
    for name in ("folder.jsonl", "data.jsonl/x.jsonl"):
        (root / "folder.jsonl").mkdir(exist_ok=True)
        with pytest.raises(DatasetRefused):
            open_below(name, [root])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
