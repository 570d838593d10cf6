"""Bugs that take a service months to show: what is kept of every job that ever was."""

from tests.mutants.mutant import Mutant, tests

RUNTIME = "service/statetap/runtime"
JOBS_THAT_ARE_OVER = tests("tests/unit/runtime/test_jobs_that_are_over.py", "-x")

MUTANTS = (
    Mutant(
        name="soak-keeps-every-tally",
        file=f"{RUNTIME}/job_states.py",
        old="            for dropped in over[:-TALLIES_KEPT]:\n",
        new="            for dropped in []:\n",
        catcher=JOBS_THAT_ARE_OVER,
        breaks="a service holds nothing for jobs that are over",
    ),
    Mutant(
        name="soak-goes-on-projecting-what-is-over",
        file=f"{RUNTIME}/job_course.py",
        old="        self.projector.forget(job)\n",
        new="",
        catcher=JOBS_THAT_ARE_OVER,
        breaks="the store of a job that failed is left alone",
    ),
    Mutant(
        name="soak-counts-strikes-of-what-is-over",
        file=f"{RUNTIME}/dispatcher.py",
        old="        if ending.counts is not None or ending.unit[0] not in self._jobs:\n",
        new="        if ending.counts is not None:\n",
        catcher=JOBS_THAT_ARE_OVER,
        breaks="a service holds nothing for jobs that are over",
    ),
)
