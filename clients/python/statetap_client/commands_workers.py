"""List the workers; add, remove or drain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from statetap_client.api_key import read_api_key
from statetap_client.options import DEFAULT_URL, AsJson, KeyFile, Url, connect
from statetap_client.output import print_json, print_table, size
from statetap_client.schemas import Worker, WorkerRequest

COLUMNS = ("worker", "state", "url", "model", "requests", "failures", "dumps", "reason")
WorkerName = Annotated[str, typer.Argument(metavar="NAME", help="The worker's name.")]

workers = typer.Typer(add_completion=False, help="List the workers; add, remove or drain one.")


@workers.callback(invoke_without_command=True)
def index(ctx: typer.Context, url: Url = DEFAULT_URL, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """List the workers; add, remove or drain one."""
    if ctx.invoked_subcommand is not None:
        return
    with connect(url, api_key_file) as client:
        found = client.workers()
    if as_json:
        print_json(found)
    else:
        print_table(COLUMNS, map(_row, found))


@workers.command()
def add(
    name: WorkerName,
    worker_url: Annotated[str, typer.Argument(metavar="WORKER_URL", help="The SGLang server, like http://127.0.0.1:30000.")],
    dumps: Annotated[Path | None, typer.Option(help="The plugin's dump root, as the service sees it.")] = None,
    dumps_config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help='A JSON file that declares the dumps: `{"kind": "plain", …}`.'),
    ] = None,
    worker_key_file: Annotated[
        Path | None, typer.Option(help="A file that holds the key that the worker wants, where it was started with one.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Add a worker."""
    if (dumps is None) == (dumps_config is None):
        raise typer.BadParameter("name the dumps: either --dumps DIR or --dumps-config FILE")
    declared = {"kind": "plugin", "dir": str(dumps)} if dumps_config is None else _read_json(dumps_config)
    try:
        request = WorkerRequest.model_validate(
            {
                "name": name,
                "url": worker_url,
                "dumps": declared,
                "api_key": None if worker_key_file is None else read_api_key(worker_key_file),
            }
        )
    except ValidationError as error:
        places = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise typer.BadParameter("; ".join(places)) from None
    with connect(url, api_key_file) as client:
        _told(client.add_worker(request), as_json=as_json)


@workers.command()
def remove(name: WorkerName, url: Url = DEFAULT_URL, api_key_file: KeyFile = None) -> None:
    """Remove a worker; what it was asked for is asked of another."""
    with connect(url, api_key_file) as client:
        client.remove_worker(name)


@workers.command()
def drain(name: WorkerName, url: Url = DEFAULT_URL, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Drain a worker: what is in flight ends, nothing further is asked of it."""
    with connect(url, api_key_file) as client:
        _told(client.drain_worker(name), as_json=as_json)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}", param_hint="--dumps-config") from None


def _told(worker: Worker, *, as_json: bool) -> None:
    if as_json:
        print_json(worker)
    else:
        typer.echo(f"{worker.name} is {worker.state}" + ("" if worker.reason is None else f": {worker.reason}"))


def _row(worker: Worker) -> tuple[str, ...]:
    return (
        worker.name,
        worker.state,
        worker.url,
        worker.model_path or "",
        f"{worker.requests:,}",
        f"{worker.failures:,}",
        size(worker.dump_bytes),
        worker.reason or "",
    )
