"""`statetap jobs`, `watch`, `pause`, `resume`, `cancel`, `retry`, `samples`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from statetap_client.calls import SampleStatusName, Verb
from statetap_client.options import DEFAULT_URL, AsJson, JobId, KeyFile, Url, connect
from statetap_client.output import duration, print_job, print_json, print_json_line, print_table, sample_counts
from statetap_client.progress import shown_progress
from statetap_client.schemas import Job
from statetap_client.sync import SyncStatetapClient

LISTED = 20
JOB_COLUMNS = ("job", "name", "state", "samples", "time left")
SAMPLE_COLUMNS = ("index", "id", "status", "length", "attempts", "worker", "reason")


def jobs(
    job_id: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Show this job.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List as many, newest first.")] = LISTED,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs, or show one."""
    with connect(url, api_key_file) as client:
        if job_id is not None:
            show(client.job(job_id), as_json=as_json)
            return
        listed = list(islice(client.jobs(), limit))
    if as_json:
        print_json(listed)
    else:
        print_table(JOB_COLUMNS, map(_job_row, listed))


def watch(
    job_id: JobId,
    events: Annotated[bool, typer.Option("--events", help="Print the job's event log, a JSON line each, and follow it.")] = False,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch a job until it ends. Exits 1 if it failed, was cancelled, or has failed samples."""
    with connect(url, api_key_file) as client:
        client.job(job_id)  # That there is no such job, or no service, is told at once; later it may restart.
        if events:
            for event in client.events(job_id):
                print_json_line(event)
            conclude(client.job(job_id))
        job = watched(client, job_id)
    show(job, as_json=as_json)
    conclude(job)


def pause(job_id: JobId, url: Url = DEFAULT_URL, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Pause a job: units in work end, no further one starts."""
    _steer(job_id, "pause", url, api_key_file, as_json=as_json)


def resume(job_id: JobId, url: Url = DEFAULT_URL, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Resume a paused job."""
    _steer(job_id, "resume", url, api_key_file, as_json=as_json)


def cancel(job_id: JobId, url: Url = DEFAULT_URL, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Cancel a job; what is stored stays."""
    _steer(job_id, "cancel", url, api_key_file, as_json=as_json)


def retry(job_id: JobId, url: Url = DEFAULT_URL, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Try a job's failed samples again."""
    _steer(job_id, "retry", url, api_key_file, as_json=as_json)


def samples(
    job_id: JobId,
    status: Annotated[SampleStatusName | None, typer.Option(help="Only these.")] = None,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line each.")] = False,
) -> None:
    """List what became of a job's samples."""
    with connect(url, api_key_file) as client:
        found = client.samples(job_id, status=status)
        if as_json:
            for sample in found:
                print_json_line(sample)
            return
        rows = ((str(s.index), s.id, s.status, str(s.length), str(s.attempts), s.worker or "", s.reason or "") for s in found)
        print_table(SAMPLE_COLUMNS, rows)


def watched(client: SyncStatetapClient, job_id: str) -> Job:
    """The job once it has ended, its progress shown until then. An interrupt stops the watching alone."""
    try:
        with shown_progress() as on_progress:
            return client.wait(job_id, on_progress=on_progress)
    except KeyboardInterrupt:
        typer.echo(f"{job_id} goes on; see it again with `statetap watch {job_id}`", err=True)
        raise typer.Exit(1) from None


def show(job: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        print_job(job)


def conclude(job: Job) -> None:
    """Exit as the job ended: 0 if every sample that was not to be skipped is stored, else 1."""
    raise typer.Exit(0 if job.state == "completed" and not job.progress.samples.failed else 1)


def _steer(job_id: str, verb: Verb, url: str, api_key_file: Path | None, *, as_json: bool) -> None:
    with connect(url, api_key_file) as client:
        job = client.steer(job_id, verb)
    if as_json:
        print_json(job)
    else:
        typer.echo(f"{job.id} is {job.state}")


def _job_row(job: Job) -> tuple[str, ...]:
    left = "" if job.progress.eta_seconds is None else duration(job.progress.eta_seconds)
    return job.id, job.name, job.state, sample_counts(job), left
