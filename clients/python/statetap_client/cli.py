"""The command line `statetap`: the client's own commands, and whatever the installed service adds to them.

Exit codes: 0 done, 1 the work failed or the service did not answer, 2 the command was used wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer
from typer.main import get_command

from statetap_client import __version__
from statetap_client.errors import ClientFailure
from statetap_client.lazy import LazyGroup


class Commands(LazyGroup):
    """What the client brings along, in the order of a job's life."""

    own: ClassVar[Mapping[str, str]] = {
        "submit": "statetap_client.commands_submit:submit",
        "jobs": "statetap_client.commands_jobs:jobs",
        "watch": "statetap_client.commands_jobs:watch",
        "pause": "statetap_client.commands_jobs:pause",
        "resume": "statetap_client.commands_jobs:resume",
        "cancel": "statetap_client.commands_jobs:cancel",
        "retry": "statetap_client.commands_jobs:retry",
        "samples": "statetap_client.commands_jobs:samples",
        "workers": "statetap_client.commands_workers:workers",
        "verify": "statetap_client.commands_verify:verify",
        "compact": "statetap_client.commands_compact:compact",
    }


app = typer.Typer(name="statetap", cls=Commands, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"statetap {__version__}")
        raise typer.Exit


@app.callback()
def statetap(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hidden states of SGLang workers, streamed into one Zarr store."""


def main() -> None:
    try:
        get_command(app)(prog_name="statetap")
    except ClientFailure as error:
        sys.stderr.write(f"statetap: {error}\n")
        sys.exit(1)
