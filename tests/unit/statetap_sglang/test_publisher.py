from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes  # noqa: F401 (numpy then knows bfloat16, which safetensors asks it for)
import numpy as np
import pytest
import torch
from safetensors import safe_open
from statetap_sglang.beacon import Beacon
from statetap_sglang.checksum import row_checksums
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.filesystem import rename_noreplace
from statetap_sglang.format import TensorView
from statetap_sglang.publisher import DumpPublisher, PublishError
from statetap_sglang.reader import open_dump
from statetap_sglang.tap import TapError, tap_is_alive

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

ROWS = 37


@pytest.fixture
def publisher(root: Path) -> Iterator[DumpPublisher]:
    publisher = DumpPublisher(root, "worker", make_beacon())
    yield publisher
    publisher.close()


def publish(publisher: DumpPublisher, rid: str = "rid", rows: int = ROWS) -> Path:
    return publisher.directory / publisher.publish(make_metadata(rid, rows), make_tensors(make_beacon(), rows))


def records(publisher: DumpPublisher) -> list[ErrorRecord]:
    paths = sorted(publisher.directory.glob("req_*.error.json"), key=lambda path: int(path.name.split(".")[0][4:]))
    return [ErrorRecord.read(path) for path in paths]


def test_any_safetensors_reader_opens_a_dump(publisher: DumpPublisher) -> None:
    tensors = make_tensors(make_beacon(), ROWS)
    path = publisher.directory / publisher.publish(make_metadata("rid ü", ROWS, prompt_len=100, forward_start_ns=5), tensors)
    with safe_open(path, "np") as file:
        assert file.metadata()["rid"] == "rid ü"
        assert file.metadata()["prompt_len"] == "100"
        for name, tensor in tensors.items():
            assert file.get_tensor(name).shape == tensor.shape
            assert file.get_tensor(name).tobytes() == bytes(tensor.data)
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == (torch.int32 if name == "token_ids" else torch.bfloat16)
            assert read.contiguous().view(torch.uint8).numpy().tobytes() == bytes(tensor.data)
        assert all(not file.get_tensor(name).any() for name in file.keys() if name.startswith("_pad_"))  # noqa: SIM118


def test_every_tensor_starts_at_a_page(publisher: DumpPublisher) -> None:
    path = publish(publisher)
    raw = path.read_bytes()
    data_start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data_start])
    starts = {name: data_start + entry["data_offsets"][0] for name, entry in header.items() if not name.startswith("_")}
    assert len(starts) == 4
    assert all(start % 4096 == 0 for start in starts.values())
    with open_dump(path) as dump:
        assert all(np.frombuffer(tensor.data, np.uint8).ctypes.data % 4096 == 0 for tensor in dump.tensors.values())
        assert dump.nbytes == -(-len(raw) // 4096) * 4096


def test_directories_are_private(publisher: DumpPublisher) -> None:
    tap = publisher.directory
    assert tap.name == "boot1-0"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tap, tap.parent, tap.parent.parent)] == [0o700] * 3
    assert stat.S_IMODE(publish(publisher).stat().st_mode) == 0o600


def test_a_root_that_others_can_open_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(TapError, match="chmod 700"):
        DumpPublisher(root, "worker", make_beacon())


def test_a_root_behind_a_symbolic_link_is_refused(root: Path) -> None:
    (root.parent / "real").mkdir(mode=0o700)
    root.symlink_to(root.parent / "real")
    with pytest.raises(TapError, match="symbolic link"):
        DumpPublisher(root, "worker", make_beacon())


@pytest.mark.parametrize("worker", ["", ".", "..", "a/b", ".hidden", "-x"])
def test_a_worker_that_is_no_name_is_refused(root: Path, worker: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a path"):
        DumpPublisher(root, worker, make_beacon())
    assert not root.exists()


def test_a_tap_has_one_publisher(root: Path, publisher: DumpPublisher) -> None:
    with pytest.raises(TapError, match="another publisher"):
        DumpPublisher(root, "worker", make_beacon())
    assert tap_is_alive(publisher.directory)
    publisher.close()
    assert not tap_is_alive(publisher.directory)
    DumpPublisher(root, "worker", make_beacon()).close()


def test_a_closed_publisher_publishes_nothing(publisher: DumpPublisher) -> None:
    publisher.close()
    with pytest.raises(PublishError, match="closed"):
        publish(publisher)
    publisher.publish_error("rid", "reason")
    assert list(publisher.directory.glob("*req_*")) == []


def test_numbers_grow_even_when_nothing_is_left(root: Path, publisher: DumpPublisher) -> None:
    numbers = []
    for _ in range(3):
        path = publish(publisher)
        numbers.append(int(path.name.removeprefix("req_").removesuffix(".safetensors")))
        path.unlink()
    publisher.close()
    again = DumpPublisher(root, "worker", make_beacon())
    numbers.append(int(publish(again).name.removeprefix("req_").removesuffix(".safetensors")))
    again.close()
    assert numbers == sorted(set(numbers))


def test_a_name_that_is_taken_is_not_replaced(publisher: DumpPublisher) -> None:
    (publisher.directory / "req_0.safetensors").write_text("precious")
    with pytest.raises(PublishError, match="exists"):
        publish(publisher)
    assert (publisher.directory / "req_0.safetensors").read_text() == "precious"
    assert list(publisher.directory.glob(".req_*")) == []
    assert publish(publisher).name == "req_1.safetensors"


def test_a_dump_is_named_before_it_is_written(publisher: DumpPublisher) -> None:
    early, lost = publisher.reserve(), publisher.reserve()
    assert publish(publisher).name == "req_2.safetensors"
    name = publisher.publish(make_metadata("early", ROWS), make_tensors(make_beacon(), ROWS), early)
    publisher.publish_error("late", "why", lost)
    assert name == "req_0.safetensors"
    assert ErrorRecord.read(publisher.directory / "req_1.error.json").rid == "late"


def test_a_dump_that_failed_leaves_its_number_to_its_error_record(publisher: DumpPublisher) -> None:
    number = publisher.reserve()
    (publisher.directory / "req_0.safetensors").mkdir()
    with pytest.raises(PublishError, match="exists"):
        publisher.publish(make_metadata("rid", ROWS), make_tensors(make_beacon(), ROWS), number)
    publisher.publish_error("rid", "exists", number)
    assert ErrorRecord.read(publisher.directory / "req_0.error.json").rid == "rid"


def test_numbers_reserved_before_a_death_are_not_used_again(root: Path, publisher: DumpPublisher) -> None:
    numbers = [publisher.reserve() for _ in range(2000)]
    publisher.close()
    again = DumpPublisher(root, "worker", make_beacon())
    assert again.reserve() > numbers[-1]
    again.close()
    assert numbers == list(range(2000))


def test_reserving_does_not_wait_for_a_write(publisher: DumpPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = []
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(
            "statetap_sglang.publisher.write_all", lambda *_: reserved.append(pool.submit(publisher.reserve).result(20))
        )
        publisher.publish_error("rid", "why")  # the record is written while other calls are kept out
    assert reserved == [1]


def test_row_checksums_go_with_the_dump(publisher: DumpPublisher) -> None:
    tensors = make_tensors(make_beacon(), ROWS)
    sums = row_checksums(tensors)
    tensors["row_checksums"] = TensorView("I64", sums.shape, sums.data.cast("B"))
    path = publisher.directory / publisher.publish(make_metadata("rid", ROWS), tensors)
    with open_dump(path) as dump:
        assert dump.tensors["row_checksums"].shape == (ROWS,)
        assert bytes(dump.tensors["row_checksums"].data) == sums.tobytes()
        assert np.frombuffer(dump.tensors["row_checksums"].data, np.uint8).ctypes.data % 4096 == 0
        dump.verify_rows()
    with safe_open(path, "np") as file:
        assert file.get_tensor("row_checksums").tolist() == sums.tolist()


def test_rename_without_replacing_takes_directories_too(root: Path) -> None:
    for name in ("source", "target"):
        (root / name).mkdir(parents=True)
    with pytest.raises(FileExistsError):
        rename_noreplace(root / "source", root / "target")
    rename_noreplace(root / "source", root / "free")
    assert sorted(path.name for path in root.iterdir()) == ["free", "target"]


def test_leftovers_of_a_dead_publisher_are_swept(root: Path, publisher: DumpPublisher) -> None:
    kept = publish(publisher)
    publisher.close()
    (publisher.directory / ".req_9.safetensors").write_bytes(b"half")
    (publisher.directory / ".tap.json").write_bytes(b"half")
    DumpPublisher(root, "worker", make_beacon()).close()
    assert sorted(path.name for path in publisher.directory.iterdir()) == [".next", kept.name]


def test_the_budget_is_of_what_still_exists(root: Path) -> None:
    with open_dump(publish(probe := DumpPublisher(root, "probe", make_beacon()))) as dump:
        size = dump.nbytes
    probe.close()
    publisher = DumpPublisher(root, "worker", make_beacon(budget_bytes=3 * size))
    first, _, _ = (publish(publisher) for _ in range(3))
    with pytest.raises(PublishError, match="over the tap's budget") as refused:
        publish(publisher, "late")
    assert refused.value.rid == "late"
    assert ErrorRecord("late", refused.value.reason).is_for_want_of_room
    assert list(publisher.directory.glob(".req_*")) == []
    first.unlink()
    publish(publisher)
    publisher.close()
    again = DumpPublisher(root, "worker", make_beacon(budget_bytes=3 * size))
    with pytest.raises(PublishError, match="over the tap's budget"):
        publish(again)
    again.close()


def test_publishing_from_many_threads(publisher: DumpPublisher) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda i: publish(publisher, f"rid-{i}"), range(64)))
    assert len(set(paths)) == 64
    for i, path in enumerate(paths):
        with open_dump(path) as dump:
            assert dump.metadata.rid == f"rid-{i}"


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writes beyond `nbytes` of a file are cut short, then fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("missing", [1, 5000, 20_000])
def test_a_write_that_fails_midway_leaves_nothing(publisher: DumpPublisher, missing: int) -> None:
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # as Python starts: the write then fails with EFBIG
    whole = publish(publisher)
    size = whole.stat().st_size
    whole.unlink()
    with file_size_limit(size - missing), pytest.raises(PublishError, match="File too large"):
        publish(publisher)
    assert [path.name for path in publisher.directory.iterdir()] == [".next"]
    publish(publisher)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = tmp_path / "small"
    target.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=64k,mode=700"):
        pytest.skip(f"mounting a tmpfs needs privileges: {os.strerror(ctypes.get_errno())}")
    yield target
    assert libc.umount2(os.fsencode(target), 2) == 0


def test_a_full_tmpfs_is_an_error_and_not_silence(small_tmpfs: Path) -> None:
    publisher = DumpPublisher(small_tmpfs, "worker", make_beacon())
    paths = [publish(publisher) for _ in range(2)]
    with pytest.raises(PublishError, match="No space left"):
        publish(publisher)
    filler = small_tmpfs / "filler"
    with filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096 and shutil.disk_usage(small_tmpfs).free:
            pass
    publisher.publish_error("a", "no space")
    publisher.publish_error("b", "no space")
    assert records(publisher) == []
    filler.unlink()
    paths.pop().unlink()
    publish(publisher)
    assert records(publisher) == [ErrorRecord("a", "no space"), ErrorRecord("b", "no space")]
    publisher.close()


def test_an_error_record_says_which_capture_and_why(publisher: DumpPublisher) -> None:
    publisher.publish_error("rid", "over budget")
    (path,) = publisher.directory.glob("req_*")
    assert path.name == "req_0.error.json"
    assert ErrorRecord.read(path) == ErrorRecord("rid", "over budget")
    assert publish(publisher).name == "req_1.safetensors"


def test_error_records_are_bounded_and_the_last_one_counts(root: Path) -> None:
    publisher = DumpPublisher(root, "worker", make_beacon(), max_error_records=3)
    for i in range(10):
        publisher.publish_error(f"rid-{i}", "why")
    assert records(publisher) == [
        ErrorRecord("rid-0", "why"),
        ErrorRecord("rid-1", "why"),
        ErrorRecord("rid-2", "why"),
        ErrorRecord("rid-9", "why", 7),
    ]
    for path in publisher.directory.glob("*.error.json"):
        path.unlink()
    publisher.publish_error("rid-10", "why")
    assert records(publisher) == [ErrorRecord("rid-10", "why")]
    publisher.close()


def test_records_that_wait_are_bounded(root: Path) -> None:
    publisher = DumpPublisher(root, "worker", make_beacon(), max_error_records=3)
    numbers = [publisher.reserve() for _ in range(8)]
    for number in numbers:
        (publisher.directory / f".req_{number}.error.json").mkdir()  # none of them can be written
    for number in numbers:
        publisher.publish_error(f"rid-{number}", "why", number)
    for number in numbers:
        (publisher.directory / f".req_{number}.error.json").rmdir()
    publish(publisher)
    assert sum(record.lost for record in records(publisher)) == 8
    assert len(records(publisher)) <= 4
    publisher.close()


def test_a_directory_that_was_removed_is_made_again(publisher: DumpPublisher) -> None:
    publisher.announce()
    before = publish(publisher)
    shutil.rmtree(publisher.directory.parent)
    after = publish(publisher, "after")
    with open_dump(after) as dump:
        assert dump.metadata.rid == "after"
    assert after.name != before.name
    assert tap_is_alive(publisher.directory)
    assert Beacon.read(publisher.directory) == make_beacon()
    assert stat.S_IMODE(publisher.directory.stat().st_mode) == 0o700
    with pytest.raises(TapError, match="another publisher"):
        DumpPublisher(publisher.directory.parent.parent, "worker", make_beacon())


def test_a_root_that_became_a_file_is_an_error(publisher: DumpPublisher) -> None:
    root = publisher.directory.parent.parent
    shutil.rmtree(root)
    root.write_text("in the way")
    with pytest.raises(PublishError, match="not a directory"):
        publish(publisher)
    publisher.publish_error("rid", "why")
    root.unlink()
    publish(publisher)
    assert records(publisher) == [ErrorRecord("rid", "why")]


def test_an_error_record_of_any_text_can_be_written(publisher: DumpPublisher) -> None:
    publisher.publish_error("\ud800" * 100_000, "\0\U0001f600" * 100_000)
    (record,) = records(publisher)
    assert len(record.rid) == 2000
    assert record.reason.startswith("\0\U0001f600")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"last_hidden_states": None}, "the tap publishes"),
        ({"surprise": "last_hidden_states"}, "unknown tensors"),
        ({"last_hidden_states": "aux_hidden_states"}, "shape"),
    ],
)
def test_tensors_that_do_not_fit_are_a_programming_error(
    publisher: DumpPublisher, changes: dict[str, str | None], message: str
) -> None:
    tensors = make_tensors(make_beacon(), ROWS)
    for name, source in changes.items():
        if source is None:
            del tensors[name]
        else:
            tensors[name] = tensors[source]
    with pytest.raises(ValueError, match=message):
        publisher.publish(make_metadata("rid", ROWS), tensors)
    with pytest.raises(ValueError, match="token_ids"):
        publisher.publish(make_metadata("rid", ROWS + 1), make_tensors(make_beacon(), ROWS))
    with pytest.raises(ValueError, match="the tap of"):
        publisher.publish(make_metadata("rid", ROWS, boot_id="other"), make_tensors(make_beacon(), ROWS))
    assert list(publisher.directory.glob("*req_*")) == []
