"""`statetap verify`: is the store what its writer wrote, and what the model computes?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.table import Table

if TYPE_CHECKING:
    from statetap_client.reader import StoreReader
    from statetap_client.verify import Progress, Report
    from statetap_client.verify_tokens import TokensReport

MODEL_SAMPLES = 8
SHOWN_FAILURES = 20


def verify(
    store: Annotated[str, typer.Argument(help="The store's directory, or its URL at an object store.")],
    model: Annotated[
        str | None,
        typer.Option(help="Also recompute hidden states with this Hugging Face model: a directory (GGUF too) or a hub name."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help=f"Stored samples to draw. Default: all for digests, {MODEL_SAMPLES} for the model."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = 0,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Relative error that passes. Default: 1e-5 for float32, else 1e-2.")
    ] = None,
    chunked: Annotated[bool, typer.Option("--chunked", help="The worker prefilled in chunks: 16-bit tolerance 5e-2.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify a store's bytes, and with --model its values. Exits 0 if all is well, 1 if not."""
    # Late, so that `--help` does not wait for zarr and torch.
    from statetap_client.reader import NotAStore, StoreReader
    from statetap_client.verify import verify_digests
    from statetap_client.verify_tokens import verify_tokens

    try:
        reader = StoreReader(store)
    except NotAStore as e:
        raise typer.BadParameter(str(e), param_hint="STORE") from e
    reports: dict[str, Report] = {}
    with _progress("digests", shown=not as_json) as advance:
        reports["digests"] = verify_digests(reader, samples, seed=seed, progress=advance)
    if model is not None:
        options = {"samples": samples or MODEL_SAMPLES, "seed": seed, "tolerance": tolerance, "chunked": chunked}
        with _progress("model", shown=not as_json) as advance:
            reports["model"] = _against_model(reader, model, progress=advance, **options)
    with _progress("tokens", shown=not as_json) as advance:
        tokens = verify_tokens(reader, progress=advance)
    passed = all(report.ok for report in reports.values())
    if as_json:
        found = {name: {"ok": report.ok, **asdict(report)} for name, report in reports.items()}
        typer.echo(orjson.dumps({"ok": passed, "tokens": asdict(tokens), **found}))
    else:
        _print(reports, tokens, passed)
    raise typer.Exit(0 if passed else 1)


def _against_model(reader: StoreReader, model: str, **options: Any) -> Report:
    try:
        from statetap_client.verify import verify_against_model
        from statetap_client.verify_reference import ModelUnusable
    except ImportError as e:
        raise typer.BadParameter(
            f"needs torch and transformers ({e}): pip install 'statetap-client[verify]'", param_hint="--model"
        ) from e
    try:
        return verify_against_model(reader, model, **options)
    except ModelUnusable as e:
        raise typer.BadParameter(str(e), param_hint="--model") from e


@contextmanager
def _progress(what: str, *, shown: bool) -> Iterator[Progress]:
    """A progress bar on a terminal's standard error, nothing where that is piped."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda done, total: None
        return
    with ProgressBar(console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(reports: dict[str, Report], tokens: TokensReport, passed: bool) -> None:
    console = Console()
    if console.is_terminal:
        table = Table("check", "samples", "failures", "largest relative error")
        for name, report in reports.items():
            errors = "\n".join(f"{array} {error:.2e}" for array, error in report.max_error.items())
            table.add_row(name, f"{report.checked} of {report.stored} stored", str(len(report.failures)), errors)
        console.print(table)
    else:
        for name, report in reports.items():
            typer.echo(f"{name}: {report.checked} of {report.stored} stored samples checked, {len(report.failures)} failures")
            for array, error in report.max_error.items():
                typer.echo(f"{name}: {array}: largest relative error {error:.2e}")
    for name, report in reports.items():
        for failure in report.failures[:SHOWN_FAILURES]:
            typer.echo(f"{name}: {failure}")
        hidden = len(report.failures) - SHOWN_FAILURES
        if hidden > 0:
            typer.echo(f"{name}: {hidden} more failures; --json has them all")
        if not report.stored:
            typer.echo(f"{name}: the store has no stored sample: there is nothing to verify")
    for sha256 in tokens.confirmed:
        typer.echo(f"tokens: dataset {sha256[:16]} is in the store as it was submitted")
    for sha256 in tokens.unconfirmed:
        typer.echo(
            f"tokens: dataset {sha256[:16]} is not in the store as it was submitted; that is as it should be only "
            "if samples were truncated, skipped or refused for their length"
        )
    typer.echo("verified" if passed else "NOT verified")
