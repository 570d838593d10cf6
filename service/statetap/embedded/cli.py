"""The command line of the embedded worker: `statetap worker`, or `python -m statetap.embedded`.

torch and transformers are imported only once the worker really starts, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from statetap.embedded.options import Dtype, Final, PlainKind, PublishedBy, WorkerOptions


def worker(
    *,
    model_path: Annotated[str, typer.Option("--model-path", "--model", help="Hugging Face directory or name, or a .gguf file.")],
    dump_dir: Annotated[Path, typer.Option(help="The dump root, on tmpfs: dumps go to a folder of this worker's in it.")],
    name: Annotated[str, typer.Option(help="The worker's name, its folder in the dump root.")] = "worker",
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind to; 0 takes a free one, which `worker.ready` tells.")] = 30000,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda, ...")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of the model; other numbers may give other bits.")] = 1,
    layers: Annotated[str, typer.Option(help="Layers to capture, such as 1,13,26; `eagle3` or `none`.")] = "eagle3",
    final: Annotated[str, typer.Option(help="Final states to capture: post_norm, pre_norm, both or none.")] = "post_norm",
    chunked_prefill_size: Annotated[int, typer.Option(help="Most prompt tokens in a pass; -1 never chunks.")] = 512,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens of a request at most. Default: the model's own limit.")
    ] = None,
    radix_cache: Annotated[bool, typer.Option(help="Reuse the states of earlier prompts' prefixes.")] = False,
    radix_cache_tokens: Annotated[int, typer.Option(help="Most tokens that the prefix cache keeps.")] = 65536,
    skip_tokenizer_init: Annotated[bool, typer.Option("--skip-tokenizer-init", help="Take token ids only.")] = False,
    publish_decode: Annotated[bool, typer.Option("--publish-decode", help="Publish the rows of decode passes, too.")] = False,
    plain: Annotated[str | None, typer.Option(help="Publish plain dumps instead: safetensors or pt.")] = None,
    plain_published_by: Annotated[
        str, typer.Option(help="How a plain dump becomes complete: rename, DONE or meta.json.")
    ] = "rename",
    budget_bytes: Annotated[int, typer.Option(help="Most bytes of dumps not yet released.")] = 4 << 30,
    gap_seconds: Annotated[float, typer.Option(help="Idle time after every pass.")] = 0.0,
) -> None:
    """Serve a Hugging Face model with SGLang's HTTP interface and publish its hidden states: a worker without a GPU."""
    try:
        options = WorkerOptions(
            model_path=model_path,
            dump_dir=dump_dir,
            name=name,
            host=host,
            port=port,
            dtype=cast("Dtype", _one_of("dtype", dtype, ("auto", "float32", "bfloat16", "float16"))),
            device=device,
            threads=threads,
            aux_layer_ids=_layer_ids(layers),
            final=cast("Final", _one_of("final", final, ("post_norm", "pre_norm", "both", "none"))),
            chunked_prefill_size=None if chunked_prefill_size == -1 else chunked_prefill_size,
            context_length=context_length,
            prefix_cache_tokens=radix_cache_tokens if radix_cache else None,
            skip_tokenizer_init=skip_tokenizer_init,
            publish_decode=publish_decode,
            plain=cast("PlainKind | None", plain and _one_of("plain", plain, ("safetensors", "pt"))),
            plain_published_by=cast(
                "PublishedBy", _one_of("plain-published-by", plain_published_by, ("rename", "DONE", "meta.json"))
            ),
            budget_bytes=budget_bytes,
            gap_seconds=gap_seconds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    try:
        from statetap_sglang.tap import TapError

        from statetap.embedded.capture import UnsupportedModel
        from statetap.embedded.server import run
    except ImportError as error:
        typer.echo(f"the embedded worker needs torch: pip install 'statetap[worker]' ({error})", err=True)
        raise typer.Exit(1) from error
    try:
        run(options)
    except (UnsupportedModel, TapError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"--{option} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def _layer_ids(value: str) -> tuple[int, ...] | None:
    if value == "eagle3":
        return None
    if value == "none":
        return ()
    try:
        return tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        raise ValueError(f"--layers is {value!r}; it must be eagle3, none, or layer ids such as 1,13,26") from None
