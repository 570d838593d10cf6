"""`statetap serve`: the service, in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from statetap.settings import SettingsError, load_settings


def serve(
    config_file: Annotated[Path | None, typer.Option("--config", help="The settings' file; default: ./statetap.toml.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the ledger and the datasets live.")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on; 0 takes a free one.")] = None,
    model: Annotated[str | None, typer.Option(help="The tokenizer of datasets that name none.")] = None,
) -> None:
    """Run the service until it is told to stop (SIGTERM, Ctrl-C); what is in flight is finished, the rest goes on next time."""
    from statetap import main
    from statetap.ports import LedgerError

    try:
        flags = {"data_dir": data_dir, "server.host": host, "server.port": port, "model": model}
        settings = load_settings(config_file, flags)
    except SettingsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    main.configure_logs(settings)
    try:
        asyncio.run(main.serve(settings))
    except (main.AlreadyRunning, LedgerError, OSError) as error:
        typer.echo(f"statetap serve: {error}", err=True)
        raise typer.Exit(1) from None
