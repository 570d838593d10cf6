"""`statetap config`: the settings that are in force, as TOML with each value's origin, or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from statetap.settings import SettingsError, Sources


def config(
    config_file: Annotated[Path | None, typer.Option("--config", help="The settings' file; default: ./statetap.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the settings that are in force, secrets masked."""
    try:
        sources = Sources.read(config_file)
        settings = sources.settings()
    except SettingsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    shown = settings.model_dump(mode="json")  # which masks secrets
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else "\n".join(_toml_lines(shown, sources)))


def _toml_lines(table: Mapping[str, Any], sources: Sources, key: tuple[str | int, ...] = ()) -> Iterator[str]:
    """A table's own values first, then its sub-tables: TOML reads whatever follows a header as that table's."""
    for name, value in table.items():
        if value is None:
            yield f"# {name} is not set"
        elif not _is_table(value):
            yield f"{_key(name)} = {_toml_value(value)}  # {sources.origin((*key, name))}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from ("", f"[{_header((*key, name))}]")
            yield from _toml_lines(value, sources, (*key, name))
        elif _is_table(value):
            for index, item in enumerate(value):
                yield from ("", f"[[{_header((*key, name))}]]")
                yield from _toml_lines(item, sources, (*key, name, index))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _header(key: Sequence[str | int]) -> str:
    return ".".join(_key(part) for part in key if isinstance(part, str))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    """A JSON value is a TOML value, but for DEL in a string and for characters that JSON writes as surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
