"""Bugs that only show when something goes wrong at the wrong moment: a handful of schedules of faults must meet each."""

from tests.mutants.mutant import Mutant, tests

RUNTIME = "service/statetap/runtime"
CORE = "service/statetap/core"
SCHEDULES = tests("tests/chaos/test_virtual_schedules.py", "-x")

MUTANTS = (
    Mutant(
        name="chaos-releases-before-the-commit",
        file=f"{RUNTIME}/unit_run.py",
        old="        try:\n            counts = await self._ports.ledger.commit_unit(",
        new="        for dump in self._dumps.values():\n            dump.release()\n"
        "        try:\n            counts = await self._ports.ledger.commit_unit(",
        catcher=SCHEDULES,
        breaks="invariant 3: a service that dies in between finds the dumps again",
    ),
    Mutant(
        name="chaos-forgets-no-answer",
        file=f"{RUNTIME}/unit_run.py",
        old="            self._ports.answers.forget(*self.id)\n",
        new="            pass\n",
        catcher=SCHEDULES,
        breaks="nothing is left lying after a job",
    ),
    Mutant(
        name="chaos-keeps-a-reservation",
        file=f"{RUNTIME}/dispatcher.py",
        old="            self._pool.free_everywhere(ending.unit)\n",
        new="            if ending.counts is not None:\n                self._pool.free_everywhere(ending.unit)\n",
        catcher=SCHEDULES,
        breaks="the room of a unit that was given back is free again",
    ),
    Mutant(
        name="chaos-trusts-every-duplicate",
        file=f"{CORE}/capture.py",
        old="        if [digests[dump] for dump in other] != wanted:\n",
        new="        if False:\n",
        catcher=SCHEDULES,
        breaks="two different readings that both fit are refused",
    ),
    Mutant(
        name="chaos-discards-nothing",
        file=f"{RUNTIME}/unit_run.py",
        old="            if self.lease.fence > 1 or self._writes:\n",
        new="            if False:\n",
        catcher=SCHEDULES,
        breaks="what an earlier lease published and did not commit does not stand in the way for ever",
    ),
)
