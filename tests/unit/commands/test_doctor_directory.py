"""What can be seen of a dump directory, with nothing changed by looking."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from statetap.commands.doctor_directory import filesystem_of, look_at_directory, memory_limit, worker_directory
from statetap_client.schemas import PluginDumps
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.refusal import Refusal
from statetap_sglang.tap import lock_tap

from tests.fakes.dumps import make_beacon, publish

MEMINFO = "MemTotal:       1024 kB\nMemFree: 10 kB\n"


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(prefix="statetap-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def publisher(root):
    publisher = DumpPublisher(root, "a", make_beacon())
    publisher.announce()
    yield publisher
    publisher.close()


def test_a_missing_directory_is_not_made(root):
    (root / "b").mkdir()
    facts = look_at_directory(root / "a")
    assert (facts.exists, facts.neighbours) == (False, ("b",))
    assert not (root / "a").exists()
    assert not look_at_directory(root / "no" / "a").exists


def test_a_living_tap_is_read(root, publisher):
    publish(publisher)
    facts = look_at_directory(worker_directory(PluginDumps(dir=str(root)), "a"))
    assert facts.exists
    assert not facts.watched
    assert facts.taps == (make_beacon(),)
    assert (facts.refusals, facts.faults) == ((), ())
    assert facts.filesystem == "tmpfs"
    assert facts.held_bytes >= 4096
    assert facts.total_bytes >= facts.free_bytes > 0


def test_a_dead_tap_is_passed_over_and_left(root, publisher):
    publisher.close()
    facts = look_at_directory(root / "a")
    assert facts.taps == ()
    assert publisher.directory.exists()


def test_a_service_that_watches_is_noticed(root, publisher):
    descriptor = os.open(root / "a", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert look_at_directory(root / "a").watched
    os.close(descriptor)
    assert not look_at_directory(root / "a").watched


def test_a_tap_that_refuses_and_one_that_has_not_said_anything(root):
    (root / "a").mkdir(mode=0o700)
    locks = [lock_tap(root / "a" / name) for name in ("boot1-0", "boot2-0", "boot3-0")]
    Refusal("layer 40 of 32", "0.1.0", "0.5.23").write(root / "a" / "boot1-0")
    (root / "a" / "boot3-0" / "tap.json").write_text("{}")
    facts = look_at_directory(root / "a")
    for lock in locks:
        os.close(lock)
    assert facts.refusals == ("layer 40 of 32",)
    assert len(facts.faults) == 2
    assert "has not announced itself" in facts.faults[0]
    assert "lacks" in facts.faults[1]


def limits(tmp_path, membership, **files):
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "7" / "cgroup").write_text(membership)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/doctor\n")
    for name, content in files.items():
        file = tmp_path / "cgroup" / name.replace("__", "/").replace("-", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroup"}


def test_the_least_limit_of_a_cgroup_and_of_those_above_counts(tmp_path):
    places = limits(tmp_path, "0::/pod/server\n", **{"pod__server__memory-max": "max\n", "pod__memory-max": "5000\n"})
    assert memory_limit(7, **places) == 5000


def test_the_first_version_of_cgroups_says_no_limit_with_a_huge_number(tmp_path):
    files = {"memory__server__memory-limit_in_bytes": "6000\n", "memory__memory-limit_in_bytes": "9223372036854771712\n"}
    assert memory_limit(7, **limits(tmp_path, "4:memory,hugetlb:/server\n3:cpu:/\n", **files)) == 6000


def test_inside_a_container_only_the_root_of_its_cgroup_is_there(tmp_path):
    assert memory_limit(7, **limits(tmp_path, "0::/kubepods/pod1\n", **{"memory-max": "7000\n"})) == 7000


def test_without_a_limit_it_is_the_machine(tmp_path):
    assert memory_limit(7, **limits(tmp_path, "0::/\n")) == 1024 * 1024


def test_a_process_that_is_not_in_sight_is_taken_for_this_one(tmp_path):
    places = limits(tmp_path, "0::/\n", **{"doctor__memory-max": "8000\n"})
    assert memory_limit(8, **places) == 8000


def test_nothing_to_read_is_not_known(tmp_path):
    assert memory_limit(7, proc=tmp_path / "no", cgroups=tmp_path / "no") is None


def test_the_innermost_and_latest_mount_counts(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/root rw\n"
        f"22 21 0:2 / {tmp_path} rw shared:3 - xfs x rw\n"
        f"23 21 0:3 / {tmp_path} rw - tmpfs t rw\n"
        f"24 21 0:4 / {tmp_path}/inner rw - overlay o rw\n"
    )
    assert filesystem_of(tmp_path / "dumps", mounts) == "tmpfs"
    assert filesystem_of(tmp_path / "inner", mounts) == "overlay"
    assert filesystem_of(Path("/elsewhere"), mounts) == "ext4"
    assert filesystem_of(tmp_path, tmp_path / "no") == ""
