"""The planted bugs: what each breaks, where, and which check must notice. Every invariant of the design has one here."""

from dataclasses import dataclass

CORE_IMPORTS = "tests/unit/test_core_imports.py"
PLACEMENT = "tests/unit/core/test_placement.py"
WORKER = "tests/unit/core/test_worker.py"
MACHINE = "tests/unit/core/test_machine.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pytest:
    """A selection of tests, as given to pytest."""

    selection: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A tool of the virtual environment and its arguments; it notices by its exit status 1."""

    arguments: tuple[str, ...]


LINT_IMPORTS = Command(arguments=("lint-imports", "--no-cache"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug: `old`, which stands exactly once in `file`, becomes `new`. `breaks` names what it would break for a user."""

    name: str
    file: str
    old: str
    new: str
    catcher: Pytest | Command
    breaks: str


def _tests(*selection: str) -> Pytest:
    return Pytest(selection=selection)


CATALOGUE = (
    Mutant(
        name="placement-unaligned",
        file="service/statetap/core/placement.py",
        old="start = -(-used // align) * align",
        new="start = used",
        catcher=_tests(PLACEMENT),
        breaks="every sample starts on a 4096-byte boundary (contract §3)",
    ),
    Mutant(
        name="placement-sample-crosses-unit",
        file="service/statetap/core/placement.py",
        old="if start + length > shard:",
        new="if start > shard:",
        catcher=_tests(PLACEMENT),
        breaks="a sample's rows never cross a unit (contract §3)",
    ),
    Mutant(
        name="placement-samples-overlap",
        file="service/statetap/core/placement.py",
        old="used = start + length\n",
        new="used = start + length - 1\n",
        catcher=_tests(PLACEMENT),
        breaks="samples never share rows",
    ),
    Mutant(
        name="placement-permutation-ignores-seed",
        file="service/statetap/core/placement.py",
        old="key = (seed % (1 << 64))",
        new="key = (0 % (1 << 64))",
        catcher=_tests(PLACEMENT),
        breaks="a seeded permutation depends on its seed",
    ),
    Mutant(
        name="placement-long-sample-one-shard",
        file="service/statetap/core/placement.py",
        old="rows = -(-used // shard) * shard",
        new="rows = shard",
        catcher=_tests(PLACEMENT),
        breaks="a sample longer than a shard gets as many as it needs",
    ),
    Mutant(
        name="machine-follows-any-event",
        file="service/statetap/core/machine.py",
        old="if state not in self.table[self.state].get(type(event), frozenset()):",
        new="if False:",
        catcher=_tests(MACHINE),
        breaks="an illegal transition raises with its history",
    ),
    Mutant(
        name="worker-two-in-flight",
        file="service/statetap/core/worker.py",
        old="        _S.BUSY: {\n",
        new="        _S.BUSY: {\n            Sent: frozenset({_S.BUSY}),\n",
        catcher=_tests(WORKER),
        breaks="invariant 1: at most one request in flight per worker",
    ),
    Mutant(
        name="worker-suspect-is-used",
        file="service/statetap/core/worker.py",
        old="self._go(event, _S.DRAINING if self.draining else _S.SUSPECT, reason)",
        new="self._go(event, _S.DRAINING if self.draining else _S.READY, reason)",
        catcher=_tests(WORKER),
        breaks="invariant 1: a request that timed out may still be running",
    ),
    Mutant(
        name="worker-drained-is-used",
        file="service/statetap/core/worker.py",
        old="self.in_flight = None\n                self._go(event, _S.DRAINING if self.draining else _S.READY, None)",
        new="self.in_flight = None\n                self._go(event, _S.READY, None)",
        catcher=_tests(WORKER),
        breaks="a draining worker gets no further request",
    ),
    Mutant(
        name="core-imports-asyncio",
        file="service/statetap/core/machine.py",
        old="from collections import deque\n",
        new="import asyncio\nfrom collections import deque\n",
        catcher=_tests(CORE_IMPORTS),
        breaks="core is pure: no clock, no I/O, no asyncio",
    ),
    Mutant(
        name="core-imports-ports",
        file="service/statetap/core/dumps.py",
        old="from dataclasses import dataclass\n",
        new="from dataclasses import dataclass\n\nfrom statetap.ports import Clock\n",
        catcher=LINT_IMPORTS,
        breaks="who may import whom: core knows nothing of the ports",
    ),
    Mutant(
        name="runtime-imports-adapter",
        file="service/statetap/runtime/views.py",
        old="from statetap.ports import Page\n",
        new="from statetap.adapters import store\nfrom statetap.ports import Page\n",
        catcher=LINT_IMPORTS,
        breaks="who may import whom: only main wires adapters",
    ),
    Mutant(
        name="client-imports-service",
        file="clients/python/statetap_client/schemas.py",
        old="from pydantic import BaseModel, ConfigDict, Field\n",
        new="import statetap.core\nfrom pydantic import BaseModel, ConfigDict, Field\n",
        catcher=LINT_IMPORTS,
        breaks="the client distributions never import the service",
    ),
)
