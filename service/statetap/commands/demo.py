"""`statetap demo`: the main job on one machine without a GPU, from real conversations to a verified store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from statetap.commands.children import Child, ChildFailed

if TYPE_CHECKING:
    from statetap_client.schemas import Job
    from statetap_client.sync import SyncStatetapClient

CONVERSATIONS = "conversations.ndjson"
MARKER = ".statetap-demo"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where dumps belong
START_SECONDS = 180.0
CHUNK_TOKENS = 512
ROWS_PER_SHARD = 2048


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo shows at its end. `seconds` is from submission to completion, `verified` the report of `statetap verify`."""

    job: Job
    store: Path
    seconds: float
    verified: dict[str, Any]


def demo(
    model: Annotated[str, typer.Option(help="The model that the workers serve: a Hugging Face directory or name.")],
    data_dir: Annotated[Path, typer.Option(help="Where everything goes; made anew by every demo.")] = Path("var/demo"),
    workers: Annotated[int, typer.Option(min=1, max=8, help="How many embedded workers to start.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    verify_samples: Annotated[
        int | None, typer.Option(min=1, help="Samples to compute again with Hugging Face. Default: all of them.")
    ] = None,
) -> None:
    """Start a service and workers, extract the hidden states of 256 conversations, and verify every one of them."""
    console = Console(soft_wrap=True)
    try:
        folder = _fresh_folder(data_dir.absolute())
        outcome = _run(console, folder, model, workers, dtype, verify_samples)
    except (ChildFailed, OSError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    _report(console, outcome)
    verified = outcome.verified["ok"] and not outcome.verified["tokens"]["unconfirmed"]
    good = outcome.job.state == "completed" and not outcome.job.failures and verified
    console.print(f"store: {outcome.store}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(0 if good else 1)


def _fresh_folder(folder: Path) -> Path:
    """The demo's folder, empty. What is not an earlier demo's is not touched."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise OSError(f"{folder} is not empty and not an earlier demo's; name another folder with --data-dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    (folder / "logs").mkdir()
    return folder


@contextmanager
def _dump_root(folder: Path) -> Iterator[Path]:
    """A dump root in shared memory, gone afterwards; without shared memory, in the demo's folder."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else folder
    with tempfile.TemporaryDirectory(prefix="statetap-demo-", dir=parent) as root:
        yield Path(root)


def _run(console: Console, folder: Path, model: str, workers: int, dtype: str, verify_samples: int | None) -> Outcome:
    from statetap_client.sync import SyncStatetapClient

    with ExitStack() as stack:
        dumps = stack.enter_context(_dump_root(folder))
        names = [f"worker-{index + 1}" for index in range(workers)]
        console.print(f"starting {workers} workers with {model} in {dtype}, and the service")
        children = []
        for name in names:
            options = ["--model", model, "--dump-dir", str(dumps), "--name", name, "--port", "0", "--dtype", dtype]
            options += ["--final", "both", "--chunked-prefill-size", str(CHUNK_TOKENS)]
            child = Child(name, "statetap.embedded", options, folder / "logs" / f"{name}.log")
            stack.callback(child.stop)
            children.append(child)
        ports = [int(child.wait_for("worker.ready", START_SECONDS)["port"]) for child in children]
        config = folder / "statetap.toml"
        config.write_text(_settings(folder, model, dumps, dict(zip(names, ports, strict=True))), encoding="utf-8")
        service = Child("service", "statetap", ["serve", "--config", str(config)], folder / "logs" / "service.log")
        stack.callback(service.stop)
        url = "http://127.0.0.1:{port}".format(**service.wait_for("service.started", START_SECONDS))
        service.wait_for("worker.ready", START_SECONDS, times=workers)
        with SyncStatetapClient(url) as client:
            job, seconds = _extract(console, client)
    store = Path(job.store)
    console.print("computing the same states with Hugging Face, one sample at a time, in another process")
    return Outcome(job, store, seconds, _verify(store, model, verify_samples or job.progress.samples.total))


def _settings(folder: Path, model: str, dumps: Path, ports: dict[str, int]) -> str:
    """The demo's `statetap.toml`. JSON strings are TOML strings."""
    lines = [f"data_dir = {json.dumps(str(folder))}", f"model = {json.dumps(model)}", "[server]", "port = 0"]
    lines += ["[runtime]", "progress_seconds = 5.0"]
    for name, port in ports.items():
        lines += ["[[workers]]", f'name = "{name}"', f'url = "http://127.0.0.1:{port}"']
        lines += [f'dumps = {{ kind = "plugin", dir = {json.dumps(str(dumps))} }}']
    return "\n".join(lines) + "\n"


def _extract(console: Console, client: SyncStatetapClient) -> tuple[Job, float]:
    from statetap_client.progress import shown_progress
    from statetap_client.schemas import JobRequest, PlacementChoice

    source = resources.files("statetap.commands") / "demo_data" / CONVERSATIONS
    began = time.monotonic()
    with resources.as_file(source) as path:
        dataset = client.create_dataset(path, name="demo-conversations")
    console.print(f"dataset {dataset.id}: {dataset.samples} conversations, {dataset.tokens:,} tokens")
    placement = PlacementChoice(rows_per_shard=ROWS_PER_SHARD)
    job = client.submit(JobRequest(dataset=dataset.id, store="demo.zarr", name="demo", placement=placement))
    with shown_progress(console) as progress:
        job = client.wait(job.id, on_progress=progress, poll_seconds=0.5)
    return job, time.monotonic() - began


def _verify(store: Path, model: str, samples: int) -> dict[str, Any]:
    """Run `statetap verify` as a process of its own, which shares no code with the worker, and return its report."""
    command = [sys.executable, "-m", "statetap_client", "verify", str(store), "--model", model, "--samples", str(samples)]
    # The workers are gone by now: all cores are free for it.
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=environment)  # noqa: S603 - ours
    try:
        report: dict[str, Any] = json.loads(ran.stdout)
    except json.JSONDecodeError:
        raise ChildFailed(f"statetap verify ended with code {ran.returncode}: {ran.stderr.strip()}") from None
    return report


def _report(console: Console, outcome: Outcome) -> None:
    import zarr

    job, progress = outcome.job, outcome.job.progress
    table = Table(title=f"{progress.samples.stored} of {progress.samples.total} conversations stored", title_justify="left")
    for column in ("array", "shape", "dtype", "max error vs Hugging Face"):
        table.add_column(column, justify="right" if column == "shape" else "left")
    errors = outcome.verified.get("model", {}).get("max_error", {})
    group = zarr.open_group(outcome.store, mode="r")
    for name, array in sorted(group.arrays()):
        table.add_row(name, " x ".join(map(str, array.shape)), str(array.dtype), _error(errors, name))
    console.print(table)
    digests, computed = outcome.verified["digests"], outcome.verified.get("model", {})
    console.print(
        f"{progress.tokens_stored:,} tokens, {progress.bytes_stored:,} bytes in {outcome.seconds:.1f} s; "
        f"layers {job.aux_layer_ids}, final {job.final}, {job.dtype}; matched by {job.identity}"
    )
    for worker, tally in sorted(job.workers.items()):
        console.print(f"{worker}: {tally.get('stored', 0)} samples stored, {tally.get('attempts', 0)} attempts")
    as_submitted = "no, they differ" if outcome.verified["tokens"]["unconfirmed"] else "yes, all"
    console.print(f"ids, tokens and masks as submitted: {as_submitted}")
    console.print(f"digests of {digests['checked']} samples read back: {_verdict(digests)}")
    console.print(f"{computed.get('checked', 0)} samples computed again with Hugging Face: {_verdict(computed)}")
    for failure in computed.get("failures", [])[:10]:
        console.print(f"  {failure}", style="red", markup=False)


def _error(errors: dict[str, Any], name: str) -> str:
    found = [value for key, value in errors.items() if key == name or key.startswith(f"{name}[")]
    return f"{max(found):.1e}" if found else ""


def _verdict(report: dict[str, Any]) -> str:
    return "all equal" if report.get("ok") else f"{len(report.get('failures', []))} differ"
