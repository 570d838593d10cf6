"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from statetap_client.calls import DEFAULT_URL, URL_VARIABLE

Url = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="The service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

__all__ = ["DEFAULT_URL", "AsJson", "JobId", "Url"]
