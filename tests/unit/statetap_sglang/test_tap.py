from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from statetap_sglang import tap
from statetap_sglang.tap import TapError, boot_of, ensure_private_directory, lock_tap, remove_dead_tap, tap_is_alive, tap_name

HOLD_LOCK = """
import sys
from pathlib import Path
from statetap_sglang.tap import lock_tap
lock = lock_tap(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_killed_publisher_is_dead(root: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    assert tap_is_alive(root)
    assert not remove_dead_tap(root)
    with pytest.raises(TapError, match="another publisher"):
        lock_tap(root)
    holder.kill()
    holder.communicate()
    assert not tap_is_alive(root)
    assert remove_dead_tap(root)
    assert not root.exists()


def test_nothing_and_no_directory_are_not_alive(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (root, tmp_path / "file", tmp_path / "link"):
        assert not tap_is_alive(path)
        assert not remove_dead_tap(path)


def test_asking_does_not_take_the_lock(root: Path) -> None:
    ensure_private_directory(root)
    assert not tap_is_alive(root)
    descriptor = lock_tap(root)
    assert tap_is_alive(root)
    os.close(descriptor)


def test_a_dead_tap_with_dumps_or_foreign_files_stays(root: Path) -> None:
    ensure_private_directory(root)
    for name in ("tap.json", ".next", "req_1.safetensors", ".req_2.safetensors"):
        (root / name).touch()
    assert not remove_dead_tap(root)
    assert sorted(path.name for path in root.iterdir()) == [".next", "req_1.safetensors", "tap.json"]
    (root / "req_1.safetensors").unlink()
    assert remove_dead_tap(root)


def test_a_lock_on_a_removed_directory_is_no_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def open_directory(directory: Path) -> int:
        opened.append(os.open(directory, os.O_RDONLY))
        if len(opened) == 1:
            directory.rmdir()  # a sweep comes between the opening and the lock
        return opened[-1]

    monkeypatch.setattr(tap, "_open_directory", open_directory)
    descriptor = lock_tap(root)
    monkeypatch.undo()
    assert len(opened) == 2
    assert tap_is_alive(root)
    os.close(descriptor)


def test_directories_of_others_are_refused(root: Path, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("giving a directory away needs privileges")
    ensure_private_directory(root)
    os.chown(root, 12345, -1)
    with pytest.raises(TapError, match="belongs to user 12345"):
        ensure_private_directory(root)
    os.chown(root, 0, -1)
    (tmp_path / "file").write_text("")
    with pytest.raises(TapError, match="not a directory"):
        ensure_private_directory(tmp_path / "file")
    with pytest.raises(TapError, match="cannot be created"):
        ensure_private_directory(tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["", "boot", "-0", ".boot-0", "boot-", "boot-01", "boot-x", "a/b-0", "boot-0\n"])
def test_names_that_are_no_taps(name: str) -> None:
    assert boot_of(name) is None


def test_a_tap_name_tells_its_boot() -> None:
    assert boot_of(tap_name("3f-a.b_c", 12)) == "3f-a.b_c"
