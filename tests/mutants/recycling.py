"""Bugs planted in recycling: dump files that the service hands back and the publisher writes over."""

from tests.mutants.mutant import Mutant, tests

FREE = "tests/unit/statetap_sglang/test_free_files.py"
PUBLISHER = "tests/unit/statetap_sglang/test_publisher_recycling.py"
SOURCE = "tests/unit/adapters/dumps/test_plugin_recycling.py"
FILE = "clients/sglang/statetap_sglang/free_files.py"

MUTANTS = (
    Mutant(
        name="recycles-what-is-still-read",
        file=FILE,
        old="            if is_read_by_nobody(descriptor):\n",
        new="            if is_read_by_nobody(descriptor) or True:\n",
        catcher=tests(PUBLISHER, "-k", "still_maps"),
        breaks="nobody who still reads a released dump sees another one's bytes in it",
    ),
    Mutant(
        name="recycled-file-keeps-its-old-end",
        file=FILE,
        old="                    os.ftruncate(descriptor, length)\n",
        new="                    os.ftruncate(descriptor, round_to_pages(length))\n",
        catcher=tests(PUBLISHER, "-k", "new_one_would_hold"),
        breaks="a dump that is written over a longer file is as long as it says",
    ),
    Mutant(
        name="free-files-are-not-room",
        file="clients/sglang/statetap_sglang/publisher.py",
        old="> 0 and self._remove_free(excess):\n",
        new="> 0 and False:\n",
        catcher=tests(PUBLISHER, "-k", "before_a_capture_is_refused"),
        breaks="no capture is lost for want of room that free files hold",
    ),
    Mutant(
        name="free-file-is-room-twice",
        file="clients/sglang/statetap_sglang/publisher.py",
        old="        return nbytes + self._free.nbytes, records, newest\n",
        new="        return nbytes, records, newest\n",
        catcher=tests(PUBLISHER, "-k", "before_a_capture_is_refused or neither_lost"),
        breaks="dumps and free files together stay within the budget",
    ),
    Mutant(
        name="recycles-linked-files",
        file=FILE,
        old="S_ISREG(status.st_mode) and status.st_nlink == 1 and",
        new="S_ISREG(status.st_mode) and",
        catcher=tests(FREE, "-k", "suspicious"),
        breaks="nobody else's file is written over through a second name",
    ),
    Mutant(
        name="free-files-outlive-their-publisher",
        file="clients/sglang/statetap_sglang/tap.py",
        old="                os.unlink(entry.path)  # noqa: PTH108 (as scandir gives it)\n    sweep_free(directory)\n",
        new="                os.unlink(entry.path)  # noqa: PTH108 (as scandir gives it)\n",
        catcher=tests(SOURCE, "-k", "dead_publisher"),
        breaks="a killed worker leaks no memory",
    ),
)
