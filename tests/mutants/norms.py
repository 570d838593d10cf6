"""Bugs planted in the norms: how they are taken, what captures are held against, and what outlives a restart."""

from tests.mutants.mutant import Mutant, tests

NORMS = "service/statetap/core/norms.py"
CORE = "tests/unit/core/test_norms.py"
RUNTIME = "tests/unit/runtime/test_norms.py"

MUTANTS = (
    Mutant(
        name="norms-of-first-rows-hide-the-others",
        file=NORMS,
        old="    return RowKind.LATER if row else RowKind.FIRST\n",
        new="    return RowKind.FIRST\n",
        catcher=tests(CORE),
        breaks="attention sinks do not let rows pass that are hundreds of times too large",
    ),
    Mutant(
        name="norms-are-forgotten-at-a-restart",
        file=NORMS,
        old="        self._seen.add_data(data)\n",
        new="",
        catcher=tests(RUNTIME, "-k", "restart"),
        breaks="what a job has seen survives a restart",
    ),
    Mutant(
        name="norms-of-another-sample-confirm",
        file=NORMS,
        old="for earlier in self._refused.get(sample, ()))",
        new="for others in list(self._refused.values()) for earlier in others)",
        catcher=tests(CORE, "-k", "same_norms_again"),
        breaks="only another attempt at the same sample says that the model computes such values there",
    ),
    Mutant(
        name="norms-refused-once-are-refused-for-ever",
        file=NORMS,
        old="        if fault is None or any(",
        new="        if fault is None or False and any(",
        catcher=tests(RUNTIME, "-k", "twice"),
        breaks="a sample whose right values are unlike all others is stored",
    ),
    Mutant(
        name="norms-overflow",
        file="service/statetap/adapters/store/row_norms.py",
        old="            sqrt(square if _LEAST_SQUARES < square < _MOST_SQUARES else _exactly(vector))\n",
        new="            sqrt(square)\n",
        catcher=tests("tests/unit/adapters/store/test_row_norms.py", "-k", "overflow"),
        breaks="norms are right over the whole range of bfloat16 and float32",
    ),
)
