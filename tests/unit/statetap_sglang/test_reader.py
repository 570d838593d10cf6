from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
from statetap_sglang import header
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import DumpFormatError, TensorView
from statetap_sglang.reader import open_dump

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

ROWS = 5


def dump_bytes(metadata: dict[str, str] | None = None) -> bytes:
    values = make_metadata("rid", ROWS).to_map() if metadata is None else metadata
    return b"".join(header.encode(make_tensors(make_beacon(), ROWS), values, page_aligned=True))


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "req_0.safetensors"


def refusal(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(DumpFormatError) as refused:
        open_dump(path)
    assert refused.value.path == str(path)
    return refused.value.reason


def test_views_survive_unlink_and_close(path: Path) -> None:
    path.write_bytes(dump_bytes())
    dump = open_dump(path)
    view = dump.tensors["last_hidden_states"].data
    path.unlink()
    dump.close()
    dump.close()
    assert bytes(view) == bytes(make_tensors(make_beacon(), ROWS)["last_hidden_states"].data)
    assert view.readonly
    assert not dump.tensors


def test_an_open_dump_holds_no_descriptor(path: Path) -> None:
    path.write_bytes(dump_bytes())
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    dumps = [open_dump(path) for _ in range(50)]
    assert len(list(descriptors.iterdir())) == before
    del dumps


def test_a_mapping_goes_with_its_last_view(path: Path) -> None:
    path.write_bytes(dump_bytes())

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    dump = open_dump(path)
    view = dump.tensors["token_ids"].data
    dump.close()
    assert mapped() == 1
    del view, dump
    assert mapped() == 0


def test_what_is_not_there_is_not_found(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_dump(path)


def test_symbolic_links_directories_and_pipes_are_refused(path: Path) -> None:
    real = path.with_name("real")
    real.write_bytes(dump_bytes())
    path.symlink_to(real)
    with pytest.raises(DumpFormatError, match="symbolic link"):
        open_dump(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DumpFormatError, match="not a regular file"):
        open_dump(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DumpFormatError, match="not a regular file"):
        open_dump(path)


@pytest.mark.parametrize("length", [0, 7, 8, 100, 4096])
def test_torn_files_are_refused(path: Path, length: int) -> None:
    assert refusal(path, dump_bytes()[:length])


def test_trailing_bytes_are_refused(path: Path) -> None:
    assert "the file has" in refusal(path, dump_bytes() + b"\0")


@pytest.mark.parametrize("claim", [(1 << 63), (1 << 64) - 1, (1 << 20) + 1, 1 << 40])
def test_a_header_length_is_not_believed(path: Path, claim: int) -> None:
    assert "at most 1048576" in refusal(path, struct.pack("<Q", claim) + dump_bytes()[8:])


def test_a_huge_header_costs_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 33))
        file.truncate(1 << 34)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DumpFormatError, match="at most"):
        open_dump(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def with_header(change: Any) -> bytes:
    """A dump whose parsed header went through `change`, which may return a new one, or text."""
    raw = dump_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    parsed = json.loads(raw[8 : 8 + length])
    changed = change(parsed)
    changed = parsed if changed is None else changed
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    return struct.pack("<Q", max(length, len(text))) + text.ljust(length) + raw[8 + length :]


def set_in(*keys: str | int, value: Any) -> Any:
    def change(parsed: Any) -> None:
        for key in keys[:-1]:
            parsed = parsed[key]
        parsed[keys[-1]] = value

    return change


LAST = "last_hidden_states"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"[]", "not a JSON object"),
        (lambda _: b"{", "not valid JSON"),
        (lambda _: b"\xff{}", "not valid JSON"),
        (lambda _: b'{"a":' * 100_000, "not valid JSON"),
        (lambda _: b"[" * 500_000, "not valid JSON"),
        (lambda _: b'{"a":' + b"9" * 100_000 + b"}", "not valid JSON"),
        (lambda _: b'{"a":NaN}', "NaN"),
        (lambda h: json.dumps(h).encode()[:-1] + b',"token_ids":' + json.dumps(h["token_ids"]).encode() + b"}", "occurs twice"),
        (set_in("__metadata__", value=[]), "map of strings"),
        (set_in("__metadata__", "rid", value=3), "map of strings"),
        (lambda h: h | {f"t{i}": h["token_ids"] for i in range(300)}, "at most 256"),
        (set_in(LAST, value=7), "not described by"),
        (set_in(LAST, "extra", value=7), "not described by"),
        (set_in(LAST, "dtype", value="BF17"), "unknown dtype"),
        (set_in(LAST, "dtype", value=["BF16"]), "unknown dtype"),
        (set_in(LAST, "shape", value=[-5, -48]), "impossible shape"),
        (set_in(LAST, "shape", value=[5.0, 48]), "impossible shape"),
        (set_in(LAST, "shape", value=[True, 240]), "impossible shape"),
        (set_in(LAST, "shape", value=[1 << 63, 1 << 63]), "impossible shape"),
        (set_in(LAST, "shape", value=[1 << 47, 1 << 47, 1 << 47]), "bytes"),
        (set_in(LAST, "shape", value=[1] * 100_000), "impossible shape"),
        (set_in(LAST, "shape", value="5,48"), "impossible shape"),
        (set_in(LAST, "data_offsets", value=[-1, 479]), "impossible data_offsets"),
        (set_in(LAST, "data_offsets", value=[0]), "impossible data_offsets"),
        (set_in(LAST, "data_offsets", value=[480, 0]), "bytes"),
        (set_in(LAST, "data_offsets", value=[0, 480]), "the one before it ends"),
        (set_in(LAST, "data_offsets", value=[1 << 40, (1 << 40) + 480]), "the one before it ends"),
    ],
)
def test_headers_that_lie_are_refused(path: Path, change: Any, reason: str) -> None:
    assert reason in refusal(path, with_header(change))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("format_version", "2", "format_version is 2"),
        ("format_version", None, "format_version is None"),
        ("rid", None, "rid is missing"),
        ("rid", "", "rid is missing"),
        ("boot_id", None, "boot_id is missing"),
        ("prefix_len", "-1", "prefix_len is '-1'"),
        ("prefix_len", "0x1", "prefix_len is '0x1'"),
        ("prefix_len", " 1", "prefix_len is ' 1'"),
        ("prefix_len", "01", "prefix_len is '01'"),
        ("prefix_len", "٣", "prefix_len is"),
        ("prefix_len", str(1 << 31), "prefix_len is"),
        ("extend_len", "0", "extend_len is 0"),
        ("extend_len", "6", "token_ids is"),
        ("prompt_len", "many", "prompt_len is 'many'"),
        ("retraction_count", "1.0", "retraction_count is"),
        ("forward_pass", "9" * 5000, "forward_pass is"),
        ("forward_start_ns", str(1 << 63), "forward_start_ns is"),
    ],
)
def test_metadata_that_is_wrong_is_refused(path: Path, key: str, value: str | None, reason: str) -> None:
    metadata = make_metadata("rid", ROWS).to_map() | ({} if value is None else {key: value})
    if value is None:
        del metadata[key]
    assert reason in refusal(path, dump_bytes(metadata))


def test_a_lone_surrogate_is_no_request_id(path: Path) -> None:
    assert "not valid Unicode" in refusal(path, with_header(set_in("__metadata__", "rid", value="\ud800")))


def test_metadata_of_a_newer_minor_writer_is_read(path: Path) -> None:
    path.write_bytes(dump_bytes(make_metadata("rid", ROWS, prompt_len=9, prefix_len=4).to_map() | {"new_key": "anything"}))
    with open_dump(path) as dump:
        assert dump.metadata == make_metadata("rid", ROWS, prompt_len=9, prefix_len=4)


def variant(**changes: TensorView | None) -> bytes:
    tensors = make_tensors(make_beacon(), ROWS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return b"".join(header.encode(kept, make_metadata("rid", ROWS).to_map(), page_aligned=True))


def zeros(dtype: str, *shape: int) -> TensorView:
    tensor = TensorView(dtype, shape, memoryview(b""))
    return TensorView(dtype, shape, memoryview(bytes(tensor.nbytes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": None}, "token_ids is None"),
        ({"token_ids": zeros("I64", ROWS)}, "token_ids is"),
        ({"token_ids": zeros("I32", ROWS, 1)}, "token_ids is"),
        ({"last_hidden_states": zeros("BF16", ROWS + 1, 48)}, "with 5 rows"),
        ({"last_hidden_states": zeros("BF16", ROWS, 49)}, "different dtypes or sizes"),
        ({"last_hidden_states": zeros("F16", ROWS, 48)}, "different dtypes or sizes"),
        ({"last_hidden_states": zeros("I32", ROWS, 48)}, "dtype I32"),
        ({"last_hidden_states": zeros("BF16", ROWS, 0)}, "with 5 rows"),
        ({"last_hidden_states": zeros("BF16", ROWS, 1, 48)}, "with 5 rows"),
        ({"aux_hidden_states": zeros("BF16", ROWS, 96)}, "(rows, layers, hidden)"),
        ({"aux_hidden_states": None, "last_hidden_states": None, "last_hidden_states_prenorm": None}, "no hidden states"),
        ({"row_checksums": zeros("I64", ROWS, 1)}, "row_checksums is"),
        ({"row_checksums": zeros("I64", ROWS + 1)}, "row_checksums is"),
        ({"row_checksums": zeros("I32", ROWS)}, "row_checksums is"),
        ({"logits": zeros("BF16", ROWS, 48)}, "unknown tensors"),
        ({"_pad_x": zeros("U8", 4)}, "unknown tensors"),
    ],
)
def test_tensors_that_are_no_dump_are_refused(path: Path, changes: dict[str, TensorView | None], reason: str) -> None:
    assert reason in refusal(path, variant(**changes))


def test_tensors_off_the_page_are_refused(path: Path) -> None:
    tensors = make_tensors(make_beacon(), ROWS)
    raw = b"".join(header.encode(tensors, make_metadata("rid", ROWS).to_map(), page_aligned=False))
    assert "multiple of 4096" in refusal(path, raw)


def test_a_row_that_is_not_what_its_source_computed_is_refused(path: Path) -> None:
    sums = row_checksums(make_tensors(make_beacon(), ROWS))
    sums[3] += 1
    path.write_bytes(variant(row_checksums=TensorView("I64", (ROWS,), sums.data.cast("B"))))
    with open_dump(path) as dump, pytest.raises(DumpFormatError, match="1 rows, the first of them row 3"):
        dump.verify_rows()


def test_a_dump_without_checksums_is_read_as_it_is(path: Path) -> None:
    path.write_bytes(dump_bytes())
    with open_dump(path) as dump:
        assert "row_checksums" not in dump.tensors
        dump.verify_rows()
