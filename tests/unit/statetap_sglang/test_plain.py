from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from statetap_sglang.format import HIDDEN_TENSORS, DumpFormatError
from statetap_sglang.plain import PlainLayout, PlainPublisher, is_complete, open_plain_dump, plain_number
from statetap_sglang.tap import TapError

from tests.fakes.dumps import hidden_only, make_beacon, make_tensors

ROWS = 7
ONE = PlainLayout.default(aux_layers=0, final="post_norm", kind="pt")
TENSORS = hidden_only(make_tensors(make_beacon(), ROWS))


def layout(**changes: Any) -> PlainLayout:
    return PlainLayout.default(**({"aux_layers": 2, "final": "both"} | changes))


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("published_by", ["rename", "DONE", "meta.json"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_published_is_read(root: Path, kind: str, published_by: str, dtype: str) -> None:
    tensors = hidden_only(make_tensors(make_beacon(dtype=dtype), ROWS))
    used = layout(kind=kind, published_by=published_by)
    publisher = PlainPublisher(root, used)
    assert [publisher.publish(tensors), publisher.publish(tensors)] == ["req_0", "req_1"]
    path = root / "req_1"
    assert is_complete(path, used)
    with open_plain_dump(path, used) as dump:
        assert dump.rows == ROWS
        assert dump.nbytes == sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir())
        for name, tensor in tensors.items():
            assert (dump.tensors[name].dtype, dump.tensors[name].shape) == (tensor.dtype, tensor.shape)
            assert bytes(dump.tensors[name].data) == bytes(tensor.data)
            assert dump.tensors[name].data.readonly
    assert sorted(entry.name for entry in root.iterdir()) == ["req_0", "req_1"]


def test_a_publisher_goes_on_after_what_is_there(root: Path) -> None:
    PlainPublisher(root, layout()).publish(TENSORS)
    (root / "req_0").rename(root / "req_0041")
    assert PlainPublisher(root, layout()).publish(TENSORS) == "req_42"


def test_a_publisher_takes_the_layouts_tensors_only(root: Path) -> None:
    with pytest.raises(ValueError, match="the layout has"):
        PlainPublisher(root, layout(final="post_norm")).publish(TENSORS)
    root.chmod(0o755)
    with pytest.raises(TapError, match="chmod 700"):
        PlainPublisher(root, layout())


@pytest.mark.parametrize("published_by", ["rename", "DONE"])
def test_a_name_that_is_taken_is_not_replaced(root: Path, published_by: str) -> None:
    publisher = PlainPublisher(root, layout(published_by=published_by))
    (root / "req_0").mkdir()
    with pytest.raises(FileExistsError):
        publisher.publish(TENSORS)
    assert list((root / "req_0").iterdir()) == []


def test_completeness(tmp_path: Path) -> None:
    path = tmp_path / "req_0"
    assert not is_complete(path, layout())
    path.mkdir()
    assert is_complete(path, layout())
    assert not is_complete(path, layout(published_by="DONE"))
    (path / "DONE").mkdir()
    assert not is_complete(path, layout(published_by="DONE"))
    (path / "DONE").rmdir()
    (path / "DONE").touch()
    assert is_complete(path, layout(published_by="DONE"))
    (tmp_path / "req_1").symlink_to(path)
    assert not is_complete(tmp_path / "req_1", layout())


@pytest.mark.parametrize(
    ("name", "number"), [("req_0", 0), ("req_0012", 12), ("req_", None), ("req_1.tmp", None), ("req_-1", None)]
)
def test_names(name: str, number: int | None) -> None:
    assert plain_number(name) == number


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "npy"}, "kind"),
        ({"published_by": "prayer"}, "published_by"),
        ({"tensors": {}}, "tensors"),
        ({"tensors": {"logits": "x"}}, "tensors"),
        ({"tensors": {"last_hidden_states": "x", "last_hidden_states_prenorm": "x"}}, "one name"),
        ({"tensors": {"last_hidden_states": "../x"}, "kind": "pt"}, "names of files"),
        ({"tensors": {"aux_hidden_states": "x"}}, "aux_layers is 0"),
        ({"tensors": {"last_hidden_states": "x"}, "aux_layers": 2}, "aux_layers is 2"),
    ],
)
def test_layouts_that_describe_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlainLayout(**({"tensors": {"last_hidden_states": "x"}} | changes))


def save(directory: Path, tensors: Mapping[str, torch.Tensor], kind: str) -> None:
    directory.mkdir()
    if kind == "safetensors":
        save_file(dict(tensors), directory / "dump.safetensors", metadata={"anything": "goes"})
    else:
        for stem, tensor in tensors.items():
            torch.save(tensor, directory / f"{stem}.pt")


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_names_of_the_servers_own_and_flat_aux_states(tmp_path: Path, kind: str) -> None:
    aux, last = torch.randn(ROWS, 96), torch.randn(ROWS, 48)
    own = {"aux": aux, "final.state": last, "positions": torch.arange(ROWS), "flags": torch.ones(3, dtype=torch.bool)}
    save(tmp_path / "req_0", own, kind)
    names = {"aux_hidden_states": "aux", "last_hidden_states": "final.state"}
    with open_plain_dump(tmp_path / "req_0", PlainLayout(kind=kind, tensors=names, aux_layers=2)) as dump:
        assert set(dump.tensors) == set(names)
        assert dump.tensors["aux_hidden_states"].shape == (ROWS, 2, 48)
        assert bytes(dump.tensors["aux_hidden_states"].data) == aux.numpy().tobytes()
        assert bytes(dump.tensors["last_hidden_states"].data) == last.numpy().tobytes()


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aux_hidden_states": torch.ones(ROWS, 97)}, "has shape"),
        ({"aux_hidden_states": torch.ones(ROWS, 3, 48)}, "has shape"),
        ({"last_hidden_states": torch.ones(ROWS, 2, 48)}, "has shape"),
        ({"last_hidden_states": torch.ones(ROWS + 1, 48)}, "do not fit"),
        ({"last_hidden_states": torch.ones(ROWS, 50)}, "do not fit"),
        ({"last_hidden_states": torch.ones(ROWS, 48).half()}, "do not fit"),
        ({"last_hidden_states": torch.ones(ROWS, 48).double()}, "64"),
        ({"last_hidden_states": torch.ones(0, 48)}, "48"),
        ({"last_hidden_states": None}, "lacks"),
    ],
)
def test_dumps_at_odds_with_the_layout(tmp_path: Path, kind: str, changes: dict[str, Any], reason: str) -> None:
    tensors: dict[str, Any] = {"aux_hidden_states": torch.ones(ROWS, 2, 48), "last_hidden_states": torch.ones(ROWS, 48)}
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save(tmp_path / "req_0", tensors, kind)
    with pytest.raises(DumpFormatError, match=reason):
        open_plain_dump(tmp_path / "req_0", layout(kind=kind, final="post_norm"))


def test_one_safetensors_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "req_0"
    with pytest.raises(FileNotFoundError):
        open_plain_dump(path, layout())
    path.mkdir()
    with pytest.raises(DumpFormatError, match="holds 0 files"):
        open_plain_dump(path, layout())
    for name in ("a", "b"):
        (path / f"{name}.safetensors").touch()
    with pytest.raises(DumpFormatError, match="holds 2 files"):
        open_plain_dump(path, layout())
    (path / "a.safetensors").unlink()
    with pytest.raises(DumpFormatError, match="too short"):
        open_plain_dump(path, layout())


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "real", {"last_hidden_states": torch.ones(ROWS, 48)}, "pt")
    (tmp_path / "req_0").symlink_to("real")
    (tmp_path / "req_1").mkdir()
    (tmp_path / "req_1" / "last_hidden_states.pt").symlink_to(tmp_path / "real" / "last_hidden_states.pt")
    (tmp_path / "req_2").touch()
    for name, reason in (("req_0", "symbolic link"), ("req_1", "symbolic link"), ("req_2", "not a directory")):
        with pytest.raises(DumpFormatError, match=reason):
            open_plain_dump(tmp_path / name, ONE)


def pt(directory: Path, write: Any) -> Path:
    path = directory / "req_0" / "last_hidden_states.pt"
    path.parent.mkdir()
    write(path)
    return path.parent


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(ROWS, 96)[:, ::2], "not dense and contiguous"),
        (torch.ones(48, ROWS).T, "not dense and contiguous"),
        (torch.eye(ROWS).to_sparse(), "not dense and contiguous"),
        ({"states": torch.ones(ROWS, 48)}, "holds a dict"),
        (torch.ones(ROWS, 48, dtype=torch.int64), "no hidden states"),
    ],
)
def test_pt_files_that_hold_no_plain_tensor(tmp_path: Path, value: Any, reason: str) -> None:
    with pytest.raises(DumpFormatError, match=reason):
        open_plain_dump(pt(tmp_path, lambda path: torch.save(value, path)), ONE)


class Evil:
    """Unpickling it would make a directory."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def test_a_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for number, write in enumerate(
        (
            lambda path: torch.save(Evil(trace), path),
            lambda path: torch.save(Evil(trace), path, _use_new_zipfile_serialization=False),
            lambda path: path.write_bytes(pickle.dumps(Evil(trace))),
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(os.urandom(5000)),
            lambda path: zipfile.ZipFile(path, "w").close(),
        )
    ):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(DumpFormatError, match=r"torch\.load"):
            open_plain_dump(pt(place, write), ONE)
    assert not trace.exists()


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_pt_file_is_refused(tmp_path: Path, keep: float) -> None:
    directory = pt(tmp_path, lambda path: torch.save(torch.ones(ROWS, 48), path))
    file = directory / "last_hidden_states.pt"
    os.truncate(file, int(file.stat().st_size * keep))
    with pytest.raises(DumpFormatError):
        open_plain_dump(directory, ONE)


def test_views_outlive_the_files(tmp_path: Path) -> None:
    for kind in ("safetensors", "pt"):
        path = tmp_path / kind / PlainPublisher(tmp_path / kind, layout(kind=kind)).publish(TENSORS)
        dump = open_plain_dump(path, layout(kind=kind))
        views = {name: tensor.data for name, tensor in dump.tensors.items()}
        for file in path.iterdir():
            file.unlink()
        dump.close()
        assert {name: bytes(view) for name, view in views.items()} == {name: bytes(TENSORS[name].data) for name in HIDDEN_TENSORS}
