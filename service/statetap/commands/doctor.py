"""`statetap doctor`: examine workers before a job uses them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console
from statetap_client.schemas import PlainDumps

from statetap.settings import Runtime, SettingsError, load_settings

if TYPE_CHECKING:
    from statetap.commands.doctor_workers import Chosen
    from statetap.ports import Clock
    from statetap.runtime.doctor.findings import Diagnosis
    from statetap.runtime.doctor.inputs import Examined

CONNECT_SECONDS = 10.0
PASSIVE_SECONDS = 15.0


def doctor(
    workers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKER]...",
            help="A worker's name, as configured or registered; with --dumps, its URL or NAME=URL. Default: all known workers.",
        ),
    ] = None,
    dumps: Annotated[Path | None, typer.Option(help="The plugin's dump root, for workers given by URL.")] = None,
    dumps_config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help='A JSON file that declares the dumps: `{"kind": "plain", …}`.'),
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="The settings' file; default: ./statetap.toml.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", envvar="STATETAP_URL", help="The running service to ask. Default: the configured one.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer, and for its dumps.")] = 60.0,
    passive: Annotated[bool, typer.Option("--passive", help="Send no prompts: look at settings and directories only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine workers before a job uses them: settings, dump directories, and what a few prompts bring. Exits 1 on an error."""
    # Late, so that `--help` does not wait for the service's own modules.
    from statetap.commands.doctor_report import as_json as report_as_json
    from statetap.commands.doctor_report import print_diagnosis
    from statetap.commands.doctor_workers import DumpOptions, UnknownWorker, choose_workers, registered_workers, service_url
    from statetap.runtime.doctor.findings import Severity

    try:
        settings = load_settings(config_file)
        registered = registered_workers(url or service_url(settings))
        chosen = choose_workers(workers or [], DumpOptions(dumps, dumps_config), settings.workers, registered)
    except (SettingsError, UnknownWorker) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    with Console(stderr=True).status(f"examining {len(chosen)} workers"):
        diagnosis = asyncio.run(_examine(chosen, settings.runtime, timeout, send_prompts=not passive))
    if as_json:
        typer.echo(orjson.dumps(report_as_json(diagnosis), option=orjson.OPT_INDENT_2))
    else:
        print_diagnosis(diagnosis)
    raise typer.Exit(1 if diagnosis.count(Severity.ERROR) else 0)


async def _examine(chosen: Sequence[Chosen], runtime: Runtime, patience_seconds: float, *, send_prompts: bool) -> Diagnosis:
    from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
    from statetap.adapters.system_clock import SystemClock
    from statetap.runtime.doctor.examination import examine

    clock = SystemClock()
    inspector = ThreadedCaptureInspector()
    try:
        return await examine(
            [_examined(one, runtime, clock, patience_seconds) for one in chosen],
            clock=clock,
            inspector=inspector,
            run=secrets.token_hex(4),
            timeout_seconds=patience_seconds,
            send_prompts=send_prompts,
        )
    finally:
        inspector.close()


def _examined(chosen: Chosen, runtime: Runtime, clock: Clock, patience_seconds: float) -> Examined:
    from statetap.commands.doctor_directory import look_at_directory, worker_directory
    from statetap.commands.doctor_server import DoctorClient
    from statetap.main import dump_source
    from statetap.runtime.doctor.inputs import Examined, ServiceView

    request, registered = chosen.request, chosen.registered
    declared = request.dumps if isinstance(request.dumps, PlainDumps) else None
    return Examined(
        name=request.name,
        url=request.url,
        server=DoctorClient(
            request.url,
            connect_seconds=min(CONNECT_SECONDS, patience_seconds),
            passive_seconds=min(PASSIVE_SECONDS, patience_seconds),
        ),
        source=dump_source(request.name, request.dumps, runtime, clock),
        look_at_directory=partial(look_at_directory, worker_directory(request.dumps, request.name)),
        declared=declared,
        quiet_period_seconds=declared.quiet_period_seconds if declared is not None else 0.0,
        service=ServiceView(registered.state, registered.reason, registered.in_flight) if registered is not None else None,
    )
