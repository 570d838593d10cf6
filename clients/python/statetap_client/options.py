"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from statetap_client.api_key import read_api_key
from statetap_client.calls import DEFAULT_URL, URL_VARIABLE
from statetap_client.sync import SyncStatetapClient

Url = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="The service.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", help="A file that holds the key to bring. Default: STATETAP_API_KEY or STATETAP_API_KEY_FILE."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

__all__ = ["DEFAULT_URL", "AsJson", "JobId", "KeyFile", "Url", "connect"]


def connect(url: str, key_file: Path | None) -> SyncStatetapClient:
    """A client of the service that a command's options name."""
    return SyncStatetapClient(url, api_key=None if key_file is None else read_api_key(key_file))
