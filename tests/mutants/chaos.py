"""Bugs that only show when something goes wrong at the wrong moment: a handful of schedules of faults must meet each."""

from tests.mutants.mutant import Mutant, tests

RUNTIME = "service/statetap/runtime"
SCHEDULES = tests("tests/chaos/test_virtual_schedules.py", "-x")

MUTANTS = (
    Mutant(
        name="chaos-forgets-no-answer",
        file=f"{RUNTIME}/unit_run.py",
        old="            self._ports.answers.forget(*self.id)\n",
        new="            pass\n",
        catcher=SCHEDULES,
        breaks="nothing is left lying after a job",
    ),
    Mutant(
        name="chaos-discards-nothing",
        file=f"{RUNTIME}/unit_run.py",
        old="            if self.lease.fence > 1 or self._writes:\n",
        new="            if False:\n",
        catcher=tests("tests/unit/runtime/test_unit_end.py", "-k", "discarded"),
        breaks="what an earlier lease published and did not commit does not stand in the way for ever",
    ),
)
