"""`statetap submit`: a dataset goes up, a job starts, and is watched if that is wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from statetap_client.commands_jobs import conclude, show, watched
from statetap_client.errors import StatetapError
from statetap_client.options import DEFAULT_URL, AsJson, KeyFile, Url, connect
from statetap_client.schemas import Capture, CompressionName, FinalName, JobRequest, PlacementChoice

STANDARD_INPUT = Path("-")


def _layer_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(layer) for layer in text.split(",") if layer.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of layer ids; write them like 1,14,26", param_hint="--layers") from None


def submit(
    dataset_file: Annotated[
        Path,
        typer.Argument(metavar="DATASET_FILE", help="NDJSON, one sample a line; `.gz` if compressed, `-` for stdin."),
    ],
    *,
    store: Annotated[str, typer.Option(help="Where the store is or will be, as the service sees it.")],
    name: Annotated[str | None, typer.Option(help="What to call dataset and job. Default: the file's name.")] = None,
    model: Annotated[str | None, typer.Option(help="Tokenise for this model. Default: the service's.")] = None,
    preset: Annotated[
        Literal["eagle3", "speculators", "all-trainers", "mtp"] | None, typer.Option(help="What to capture, by who trains on it.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="What to capture: ids of layers, like 1,14,26.")] = None,
    final: Annotated[FinalName | None, typer.Option(help="What to capture: forms of the final state.")] = None,
    identity: Annotated[Literal["tokens", "count"] | None, typer.Option(help="How dumps are matched to samples.")] = None,
    order: Annotated[Literal["dataset", "permutation"], typer.Option(help="The samples' order in the store.")] = "dataset",
    seed: Annotated[int, typer.Option(help="Of the permutation.")] = 0,
    rows_per_shard: Annotated[int | None, typer.Option(min=1, help="Default: what makes a unit of 256 MiB.")] = None,
    rows_per_chunk: Annotated[int | None, typer.Option(min=1, help="Default: what makes a chunk of 1 MiB.")] = None,
    compression: Annotated[
        CompressionName, typer.Option(help="Of the hidden states: zstd takes about 0.7 of the space, and more processor time.")
    ] = "none",
    on_over_long: Annotated[Literal["fail", "truncate", "skip"], typer.Option(help="Samples longer than the context.")] = "fail",
    priority: Annotated[int, typer.Option(min=-1000, max=1000, help="Higher goes first.")] = 0,
    allow_empty_mask: Annotated[bool, typer.Option("--allow-empty-mask", help="Take samples with no token to train on.")] = False,
    ignore_space: Annotated[bool, typer.Option("--ignore-space", help="Start even if the store lacks the space.")] = False,
    gzip: Annotated[bool, typer.Option(help="Compress what is sent; worth it over a slow network.")] = False,
    wait: Annotated[bool, typer.Option(help="Watch the job until it ends.")] = True,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Submit a dataset and start a job on it. With --wait it exits 1 if the job failed or has failed samples."""
    capture = Capture(preset=preset, aux_layer_ids=_layer_ids(layers), final=final, identity=identity)
    placement = PlacementChoice(order=order, seed=seed, rows_per_shard=rows_per_shard, rows_per_chunk=rows_per_chunk)
    if dataset_file != STANDARD_INPUT and not dataset_file.is_file():
        raise typer.BadParameter(f"there is no file {dataset_file}", param_hint="DATASET_FILE")
    samples: Path | Iterable[bytes] = sys.stdin.buffer if dataset_file == STANDARD_INPUT else dataset_file
    called = name or (None if dataset_file == STANDARD_INPUT else dataset_file.name.partition(".")[0])
    with connect(url, api_key_file) as client:
        dataset = client.create_dataset(samples, name=called, model=model, allow_empty_mask=allow_empty_mask, gzip=gzip)
        typer.echo(f"dataset {dataset.id}: {dataset.samples:,} samples, {dataset.tokens:,} tokens", err=True)
        request = JobRequest(
            dataset=dataset.id,
            store=store,
            name=name,
            priority=priority,
            capture=capture,
            placement=placement,
            compression=compression,
            on_over_long=on_over_long,
            ignore_space=ignore_space,
        )
        try:
            job = client.submit(request)
        except StatetapError:
            # Nobody else knows of the dataset, and the next try sends it again.
            client.delete_dataset(dataset.id)
            raise
        typer.echo(f"job {job.id} is {job.state}", err=True)
        if wait:
            job = watched(client, job.id)
    show(job, as_json=as_json)
    if wait:
        conclude(job)
