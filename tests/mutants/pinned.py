"""Bugs planted in pinned files: dump files in which copies from a device land."""

from tests.mutants.mutant import Mutant, tests

PACKAGE = "clients/sglang/statetap_sglang"
IN_PLACE = "tests/unit/statetap_sglang/test_in_place.py"
TROUBLE = "tests/unit/statetap_sglang/test_in_place_trouble.py"
FILES = f"{PACKAGE}/pinned_files.py"

MUTANTS = (
    Mutant(
        name="lands-in-what-is-still-read",
        file=FILES,
        old="                usable = is_read_by_nobody(file.descriptor)\n",
        new="                usable = is_read_by_nobody(file.descriptor) or True\n",
        catcher=tests(IN_PLACE, "-k", "still_maps or another_process"),
        breaks="nobody who still reads a released dump sees another one's bytes in it",
    ),
    Mutant(
        name="one-file-for-two-captures",
        file=FILES,
        old="                self._ready.remove(file)\n",
        new="",
        catcher=tests(IN_PLACE, "-k", "lent_to_one_capture"),
        breaks="a page is one capture's while a copy to it is in flight",
    ),
    Mutant(
        name="pages-unmapped-while-registered",
        file=FILES,
        old="            self._stuck.append(file.pages)\n",
        new="",
        catcher=tests(TROUBLE, "-k", "cannot_be_unregistered"),
        breaks="pages that the device may know of stay mapped",
    ),
    Mutant(
        name="unregistered-while-copies-are-on-their-way",
        file=f"{PACKAGE}/host_registration.py",
        old="        self._settle()\n",
        new="",
        catcher=tests("tests/unit/statetap_sglang/test_host_registration.py"),
        breaks="pages are unregistered once nothing is on its way to them",
    ),
    Mutant(
        name="uses-a-file-that-was-cut",
        file=FILES,
        old="        file.modified_ns,\n    )\n",
        new="        there.st_mtime_ns,\n    )\n",
        catcher=tests(TROUBLE, "-k", "not_as_it_was_left"),
        breaks="what a device copies is in the file, not in pages that were once its own",
    ),
    Mutant(
        name="pinned-files-are-no-room",
        file=f"{PACKAGE}/publisher.py",
        old=" + (self._pinned.nbytes if self._pinned else 0)\n",
        new="\n",
        catcher=tests(IN_PLACE, "-k", "count_wherever or before_a_capture_is_refused"),
        breaks="all that a tap holds is within its budget",
    ),
    Mutant(
        name="published-before-it-has-arrived",
        file=f"{PACKAGE}/background.py",
        old="        job.arrival.wait()\n",
        new="",
        catcher=tests("tests/unit/statetap_sglang/test_background.py"),
        breaks="a dump is visible only once its states are in it",
    ),
)
