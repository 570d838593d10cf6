"""`statetap key`: a new API key, told once, and its hash for the configuration."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated, Literal

import typer
from pydantic import ValidationError

from statetap.settings import KEY_PREFIX, ApiKey


def key(
    name: Annotated[str, typer.Argument(help="Who will use it: a name for people, in the configuration.")],
    scope: Annotated[Literal["read-only", "admin"], typer.Option(help="What it allows: to look, or everything.")] = "read-only",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make an API key. It is printed once and kept nowhere: only its hash goes into the service's configuration."""
    text = new_key()
    try:
        configured = ApiKey(name=name, scope=scope, sha256=hashlib.sha256(text.encode()).hexdigest())
    except ValidationError as error:
        raise typer.BadParameter(str(error.errors()[0]["msg"]), param_hint="NAME") from None
    if as_json:
        typer.echo(json.dumps({"key": text, **configured.model_dump()}, indent=2))
        return
    typer.echo("Into the service's statetap.toml, which takes effect at its next start:\n", err=True)
    lines = ["[[keys]]", *(f"{field} = {json.dumps(value)}" for field, value in configured.model_dump().items())]
    typer.echo("\n".join(lines), err=True)
    typer.echo("\nTo whoever calls it, as STATETAP_API_KEY or in a file for --api-key-file:\n", err=True)
    typer.echo(text)


def new_key() -> str:
    """256 random bits, in the form that the service takes."""
    return KEY_PREFIX + secrets.token_urlsafe(32)
