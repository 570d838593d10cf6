"""`python -m statetap.embedded`: the same as `statetap worker`."""

from __future__ import annotations

import typer

from statetap.embedded.cli import worker

if __name__ == "__main__":
    typer.run(worker)
