"""Imports planted where the layers of the design forbid them."""

from tests.mutants.mutant import LINT_IMPORTS, Mutant, tests

MUTANTS = (
    Mutant(
        name="core-imports-asyncio",
        file="service/statetap/core/machine.py",
        old="from collections import deque\n",
        new="import asyncio\nfrom collections import deque\n",
        catcher=tests("tests/unit/test_core_imports.py"),
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
        old="from urllib.parse import urlsplit\n",
        new="from urllib.parse import urlsplit\n\nimport statetap.core\n",
        catcher=LINT_IMPORTS,
        breaks="the client distributions never import the service",
    ),
)
