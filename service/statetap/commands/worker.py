"""`statetap worker`: the embedded worker, in the foreground. All of it is in `statetap.embedded.cli`."""

from __future__ import annotations

from statetap.embedded.cli import worker

__all__ = ["worker"]
