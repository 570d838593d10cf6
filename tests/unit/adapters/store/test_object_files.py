"""Files filled from front to back: the same bytes past the page cache and through it, and what the kernel is asked for."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statetap.adapters.store import durable_files, object_files
from statetap.adapters.store.direct_io import Alignment, address_of, direct_alignment
from statetap.adapters.store.object_files import WINDOW_BYTES, create

BLOCK = 4096
STRICT = Alignment(512, BLOCK)


@pytest.fixture(params=["direct", "cached"])
def alignment(request, tmp_path) -> Alignment | None:
    if request.param == "cached":
        return None
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        found = direct_alignment(file.fileno())
    if found is None:
        pytest.skip("this file system has no O_DIRECT")
    return found


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    """Random bytes that begin at a page, as a dump's tensors do."""
    whole = np.random.default_rng(0).integers(0, 256, (4 << 20) + BLOCK, np.uint8)
    start = -whole.ctypes.data % BLOCK
    return whole[start : start + (4 << 20)]


class Calls:
    """Every pwritev of a file: what the kernel would refuse under O_DIRECT is refused here, whatever the file system."""

    def __init__(self, monkeypatch) -> None:
        self.addresses: list[tuple[int, int]] = []
        pwritev = os.pwritev

        def strict(descriptor, buffers, offset):
            for buffer in buffers:
                if address_of(buffer) % STRICT.memory or len(buffer) % BLOCK or offset % BLOCK:
                    raise OSError(errno.EINVAL, f"{address_of(buffer):#x} +{len(buffer)} at {offset}")
                self.addresses.append((address_of(buffer), len(buffer)))
            return pwritev(descriptor, buffers, offset)

        monkeypatch.setattr(durable_files.os, "pwritev", strict)


def written(path: Path, windows: list[list[memoryview]], alignment: Alignment | None) -> bytes:
    nbytes = sum(len(buffer) for window in windows for buffer in window)
    file = create(path, nbytes, alignment)
    for window in windows:
        file.write(window)
    file.finish()
    file.close()
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5 * BLOCK), st.sampled_from([1, 512, 4096])), max_size=12),
    cuts=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_any_buffers_make_their_concatenation(memory, pieces, cuts) -> None:
    """At any address, of any length, cut into windows anywhere."""
    windows: list[list[memoryview]] = [[]]
    for (start, length, step), cut in zip(pieces, cuts, strict=False):
        windows[-1].append(memory[start * step % (1 << 20) :][:length].data)
        if cut:
            windows.append([])
    wanted = b"".join(bytes(buffer) for window in windows for buffer in window)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        assert written(Path(folder, "cached"), windows, None) == wanted
        Calls(monkeypatch)
        assert written(Path(folder, "direct"), windows, STRICT) == wanted


def test_only_blocks_in_which_buffers_meet_are_bounced(tmp_path, monkeypatch, memory) -> None:
    """Samples that end within a page, zeros up to the next one's start, and an index: the rest goes as it stands."""
    calls = Calls(monkeypatch)
    zeros = memoryview(bytes(BLOCK))
    first, second = memory[: 100 * BLOCK + 1000].data, memory[1 << 20 : (1 << 20) + 50 * BLOCK + 8].data
    wanted = [first, zeros[: BLOCK - 1000], second, zeros[: BLOCK - 8], zeros[:340]]
    assert written(tmp_path / "object", [wanted], STRICT) == b"".join(wanted)
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    straight = [length for address, length in calls.addresses if start <= address < end]
    assert straight == [100 * BLOCK, 50 * BLOCK]
    assert sum(length for _, length in calls.addresses) - sum(straight) == 3 * BLOCK


def test_another_phase_is_bounced_whole(tmp_path, monkeypatch, memory) -> None:
    calls = Calls(monkeypatch)
    data = memory[100 : 100 + 3 * WINDOW_BYTES // 8].data
    assert written(tmp_path / "object", [[data]], STRICT) == data
    assert not [address for address, _ in calls.addresses if memory.ctypes.data <= address < memory.ctypes.data + memory.nbytes]


def test_short_writes_are_finished(tmp_path, monkeypatch, alignment, memory) -> None:
    pwritev = os.pwritev
    most = 1000 if alignment is None else 3 * BLOCK + 100
    monkeypatch.setattr(durable_files.os, "pwritev", lambda *call: min(pwritev(*call), most))
    data = memory[: 10 * BLOCK + 5].data
    assert written(tmp_path / "object", [[data[:5000], data[5000:]]], alignment) == data


def test_a_kernel_that_takes_less_than_a_block_is_an_error(tmp_path, monkeypatch, memory) -> None:
    monkeypatch.setattr(durable_files.os, "pwritev", lambda *_: 100)
    with pytest.raises(OSError, match="takes less than 4096 bytes"):
        written(tmp_path / "object", [[memory[: 2 * BLOCK].data]], STRICT)


def test_more_buffers_than_one_call_takes(tmp_path, alignment, memory) -> None:
    buffers = [memory[i * BLOCK : i * BLOCK + size].data for i in range(700) for size in (BLOCK, 7)]
    assert written(tmp_path / "object", [buffers], alignment) == b"".join(buffers)


def test_it_is_synced_after_its_last_byte(tmp_path, monkeypatch, alignment, memory) -> None:
    log: list[str] = []
    for name in ("pwritev", "ftruncate", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *call, name=name, real=real: log.append(name) or real(*call))
    written(tmp_path / "object", [[memory[:9000].data], [memory[:340].data]], alignment)
    assert log[-1] == "fsync"
    assert "pwritev" in log


def test_nothing_is_replaced(tmp_path, alignment) -> None:
    (tmp_path / "object").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        create(tmp_path / "object", 1, alignment)


def test_no_space_is_told_at_once_and_closes_the_file(tmp_path, alignment, monkeypatch) -> None:
    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(object_files, "allocate", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="full"):
        create(tmp_path / "object", 1, alignment)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_empty_object(tmp_path, alignment) -> None:
    assert written(tmp_path / "object", [], alignment) == b""
