"""Bugs planted where it is decided whose fault failed attempts are, and where bad workers are taken out of use."""

from tests.mutants.mutant import Mutant, tests

CORE, RUNTIME = "service/statetap/core", "service/statetap/runtime"

MUTANTS = (
    Mutant(
        name="blame-takes-one-sample-for-a-worker",
        file=f"{CORE}/blame.py",
        old="LEAST_SAMPLES = 2",
        new="LEAST_SAMPLES = 1",
        catcher=tests("tests/unit/core/test_blame.py"),
        breaks="one bad sample alone takes no worker out of use",
    ),
    Mutant(
        name="blame-keeps-a-sample-that-failed-at-two-workers",
        file=f"{CORE}/blame.py",
        old="        if len(failed_at) > 1:\n",
        new="        if len(failed_at) > 99:\n",
        catcher=tests("tests/unit/runtime/test_blaming.py"),
        breaks="a sample that fails on two workers is the sample's fault",
    ),
    Mutant(
        name="blame-outlasts-a-capture",
        file=f"{CORE}/blame.py",
        old="for number, failure in record.streak if number > asked.number]",
        new="for number, failure in record.streak]",
        catcher=tests("tests/unit/core/test_blame.py"),
        breaks="only failures in a row, since the last capture, are the worker's",
    ),
    Mutant(
        name="blame-forgives-nothing",
        file=f"{RUNTIME}/blaming.py",
        old="            self._forgive(blamed)\n",
        new="",
        catcher=tests("tests/unit/runtime/test_blaming.py"),
        breaks="attempts that failed by a worker's fault do not use up their samples' budgets",
    ),
    Mutant(
        name="probation-costs-the-sample",
        file=f"{CORE}/unit.py",
        old="uses_budget=fault is msg.Fault.ATTEMPT and not attempt.probation)",
        new="uses_budget=fault is msg.Fault.ATTEMPT)",
        catcher=tests("tests/unit/core/test_unit_budget.py"),
        breaks="a failure on probation is never the sample's",
    ),
    Mutant(
        name="probation-without-end",
        file=f"{CORE}/worker.py",
        old="self.on_probation = self.on_probation and not probe",
        new="pass",
        catcher=tests("tests/unit/core/test_worker.py"),
        breaks="a worker on probation is asked for one sample and no more before its capture is there",
    ),
    Mutant(
        name="quarantine-ends-with-an-outage",
        file=f"{CORE}/worker.py",
        old="                if tap != self.tap:\n",
        new="                if True:\n",
        catcher=tests("tests/unit/core/test_worker.py"),
        breaks="a quarantined worker that was unreachable for a moment is still quarantined",
    ),
    Mutant(
        name="want-of-room-uses-up-attempts",
        file=f"{RUNTIME}/dump_intake.py",
        old="Fault.NOBODY if loss.for_want_of_room else Fault.ATTEMPT",
        new="Fault.ATTEMPT",
        catcher=tests("tests/unit/runtime/test_lost_captures.py"),
        breaks="want of room in the dump directory is back-pressure, not attempts",
    ),
    Mutant(
        name="blame-takes-a-lost-request-for-bad-samples",
        file=f"{CORE}/blame.py",
        old="        if costs:\n",
        new="        if True:\n",
        catcher=tests("tests/unit/core/test_blame.py", "-k", "lost_request"),
        breaks="what befalls a whole request says nothing of its samples",
    ),
)
