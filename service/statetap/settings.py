"""What a person may set (contract §6): `statetap.toml`, overridden by `STATETAP_*` variables, overridden by flags.

A key that no setting has is an error, wherever it stands. Nothing here is read again once the service runs.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableVariable
from statetap_client.schemas import Name, WorkerRequest

from statetap.core.object_urls import normalise

PREFIX = "STATETAP_"
DEFAULT_FILE = Path("statetap.toml")
CONFIG_VARIABLE = "STATETAP_CONFIG"
KEY_PREFIX = "statetap_"
KEY_PATTERN: Final = re.compile(KEY_PREFIX + r"[A-Za-z0-9_-]{43}", re.ASCII)
"""A caller's key: 256 random bits in base64url. The prefix lets those who search for leaked secrets know it."""

# Variables that share the prefix and are somebody else's: the plugin's, the client's, and the one that names the file.
FOREIGN_PREFIXES = ("STATETAP_PLUGIN_",)
FOREIGN_VARIABLES = frozenset({CONFIG_VARIABLE, "STATETAP_URL", "STATETAP_API_KEY", "STATETAP_API_KEY_FILE"})

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
ObjectUrl = Annotated[str, AfterValidator(normalise)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class SettingsError(Exception):
    """Settings that cannot be used: one line for each fault, with where it was set, the reason and the way out."""


class Section(BaseModel):
    """A table of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Server(Section):
    """Where the HTTP API listens. Only loopback is allowed while no keys are configured; then it answers to names of this machine

    alone, and to `trusted_hosts`, the names under which a proxy on this machine makes it known.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8420, ge=0, le=65535)
    trusted_hosts: tuple[str, ...] = ()


class ApiKey(Section):
    """A key that callers may bring, by the SHA-256 of its text; `statetap key` makes one. `name` is for people."""

    name: Name
    scope: Literal["read-only", "admin"]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Limits(Section):
    """The largest dataset that is taken: bytes of a body and of one line of it, and samples."""

    dataset_body_bytes: Count = 64 << 30
    dataset_line_bytes: Count = 64 << 20
    dataset_samples: Count = 10_000_000


class Runtime(Section):
    """How the runtime paces itself. A request may take the base plus so much for each 1,000 tokens of its samples.

    After `quarantine_failures` failed attempts in a row a worker is quarantined, for `quarantine_seconds` at first; after
    `quarantines_until_dead` of them in a row it is not used any more.
    The samples of a request hold `max_batch_tokens` together at most, 0 is one sample a request; not set, each worker's is tuned.
    While a store's file system has less than `disk_reserve_bytes` free, its jobs are paused.
    """

    lease_seconds: Seconds = 60.0
    request_timeout_base_seconds: Seconds = 60.0
    request_timeout_seconds_per_1k_tokens: float = Field(default=30.0, ge=0)
    capture_timeout_seconds: Seconds = 30.0
    max_batch_tokens: int | None = Field(default=None, ge=0)
    attempts_per_sample: Count = 4
    retry_backoff_seconds: float = Field(default=0.5, ge=0)
    quarantine_failures: int = Field(default=3, ge=2)
    quarantine_seconds: Seconds = 30.0
    quarantines_until_dead: Count = 6
    probe_seconds: Seconds = 2.0
    progress_seconds: Seconds = 10.0
    projection_seconds: Seconds = 5.0
    writer_threads: Count = 2
    disk_reserve_bytes: int = Field(default=1 << 30, ge=0)
    disk_probe_seconds: Seconds = 5.0
    rescan_seconds: Seconds = 30.0
    torn_after_seconds: Seconds = 60.0
    drain_seconds: float = Field(default=30.0, ge=0)


class Log(Section):
    """`auto` is coloured text on a terminal and JSON lines elsewhere."""

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


Named = ApiKey | WorkerRequest


class Conflict(ValueError):
    """Values that are fine alone and cannot be together; `key` is the one to change."""

    def __init__(self, key: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.key = key


class Settings(BaseSettings):
    """All settings. Made by `Sources.settings`, so that errors name the place where a value was set.

    `data_dir` holds the ledger and the datasets, and by default the stores; stores may also be below the URLs in `object_stores`;
    from below `dataset_roots` datasets may be read by path; `model` is the tokenizer of a dataset that names none; models in
    `trust_remote_code` may run code of their own.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    data_dir: AbsolutePath = Field(default=Path("~/.local/share/statetap"), validate_default=True)
    store_roots: tuple[AbsolutePath, ...] = Field(default=(), validate_default=True)
    object_stores: tuple[ObjectUrl, ...] = ()
    dataset_roots: tuple[AbsolutePath, ...] = ()
    model: str | None = None
    trust_remote_code: tuple[str, ...] = ()
    server: Server = Server()
    keys: tuple[ApiKey, ...] = ()
    limits: Limits = Limits()
    runtime: Runtime = Runtime()
    log: Log = Log()
    workers: tuple[WorkerRequest, ...] = ()

    @field_validator("store_roots")
    @classmethod
    def _below_data_dir(cls, roots: tuple[Path, ...], info: ValidationInfo) -> tuple[Path, ...]:
        return roots or tuple(info.data[name] / "stores" for name in ("data_dir",) if name in info.data)

    @field_validator("workers", "keys")
    @classmethod
    def _distinct(cls, named: tuple[Named, ...]) -> tuple[Named, ...]:
        names = [item.name for item in named]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)}: configured more than once; give each a name of its own")
        return named

    @model_validator(mode="after")
    def _loopback_without_keys(self) -> Self:
        if not self.keys and not _is_loopback(self.server.host):
            raise Conflict(
                ("server", "host"),
                f"{self.server.host!r} can be reached from outside, and without configured keys the service binds to loopback "
                "only; use 127.0.0.1 or ::1, or make a key with `statetap key`",
            )
        return self


@dataclass(frozen=True, slots=True)
class Sources:
    """The three places that settings come from, read: `flags` and `document` are nested like the settings."""

    flags: Mapping[str, Any]
    variables: Mapping[str, str]
    file: Path | None
    document: Mapping[str, Any]

    @classmethod
    def read(cls, config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Sources:
        """Read the file that `config`, else STATETAP_CONFIG, names; else ./statetap.toml if there is one.

        `flags` maps dotted keys (`server.port`) to values; None is a flag that was not given.

        Raises:
            SettingsError: the file is missing or no TOML.
        """
        named = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
        file = named or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
        document: dict[str, Any] = {}
        if file is not None:
            try:
                document = tomllib.loads(file.read_text(encoding="utf-8"))
            except OSError as error:
                raise SettingsError(f"{file}: {error.strerror}; name another file with --config or {CONFIG_VARIABLE}") from error
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise SettingsError(f"{file}: not TOML: {error}") from error
        nested: dict[str, Any] = {}
        for key, value in (flags or {}).items():
            if value is not None:
                *sections, name = key.split(".")
                table = nested
                for section in sections:
                    table = table.setdefault(section, {})
                table[name] = value
        ours = {
            name.upper(): value
            for name, value in os.environ.items()
            if name.upper().startswith(PREFIX) and not name.upper().startswith(FOREIGN_PREFIXES) and value
        }
        return cls(nested, {name: ours[name] for name in sorted(ours.keys() - FOREIGN_VARIABLES)}, file, document)

    def settings(self) -> Settings:
        """The settings in force.

        Raises:
            SettingsError: unknown keys, or values that do not fit.
        """
        document = dict(self.document)

        class Configured(Settings):
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=document)

        # pydantic-settings looks for the variables that it knows: it cannot see one of an unknown name.
        faults = [self._unknown(key) for key in map(_variable_key, self.variables) if key[0] not in Settings.model_fields]
        try:
            if not faults:
                return Configured(**self.flags)
        except UnreadableVariable as error:
            unreadable = [name for name in self.variables if f'"{_variable_key(name)[0]}"' in str(error)]
            faults = [f"{', '.join(unreadable)}: not JSON; write a list or a table in a variable as JSON, such as '[\"/data\"]'"]
        except ValidationError as error:
            faults = [self._fault(dict(detail)) for detail in error.errors(include_url=False)]
        raise SettingsError("\n".join(faults))

    def origin(self, key: Sequence[str | int]) -> str:
        """Where the value of a key was set: `a flag`, a variable's name, the file, or `default`."""
        names = [part for part in key if isinstance(part, str)]
        if _holds(self.flags, key):
            return "a flag"
        for end in range(len(names), 0, -1):
            if _variable(names[:end]) in self.variables:
                return _variable(names[:end])
        return str(self.file) if _holds(self.document, key) else "default"

    def _fault(self, detail: Mapping[str, Any]) -> str:
        error = detail.get("ctx", {}).get("error")
        key = error.key if isinstance(error, Conflict) else _without_tags(detail["loc"])
        if detail["type"] == "extra_forbidden":
            return self._unknown(key)
        reason = str(error or detail["msg"])
        origin = self.origin(key[:-1] if detail["type"] == "missing" else key)
        return f"{origin}: {_dotted(key)}: {reason}"

    def _unknown(self, key: tuple[str | int, ...]) -> str:
        nearest = _nearest(tuple(part for part in key if isinstance(part, str)))
        # What stands in a list of tables has no variable of its own.
        variable = "" if nearest[0] in ("workers", "keys") else f" (variable {_variable(nearest)})"
        return f"{self.origin(key)}: unknown key {_dotted(key)}; the nearest known one is {'.'.join(nearest)}{variable}"


def load_settings(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force: see `Sources.read` and `Sources.settings`."""
    return Sources.read(config, flags).settings()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _variable(names: Sequence[str]) -> str:
    return PREFIX + "__".join(names).upper()


def _variable_key(variable: str) -> tuple[str, ...]:
    return tuple(variable.removeprefix(PREFIX).lower().split("__"))


def _holds(table: Any, key: Sequence[str | int]) -> bool:
    for part in key:
        try:
            table = table[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _known_keys(annotation: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key below a model, as a tuple of names; those of a list's tables stand below the list's own key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield (*prefix, name)
            yield from _known_keys(field.annotation, (*prefix, name))
    else:
        for argument in get_args(annotation):
            yield from _known_keys(argument, prefix)


KNOWN_KEYS = tuple(dict.fromkeys(_known_keys(Settings)))


def _without_tags(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """A pydantic error's location less the names that it puts in for the members of a union (`plugin`, `plain`)."""
    key: list[str | int] = []
    names: tuple[str, ...] = ()
    for at, part in enumerate(location):
        if isinstance(part, int):
            key.append(part)
        elif (*names, part) in KNOWN_KEYS or at == len(location) - 1:
            names = (*names, part)
            key.append(part)
    return tuple(key)


def _nearest(key: tuple[str, ...]) -> tuple[str, ...]:
    """The known key most like this one: by its whole path, else by its last name alone, else whatever comes nearest."""
    whole = {"_".join(known): known for known in KNOWN_KEYS}
    last = {known[-1]: known for known in reversed(KNOWN_KEYS)}
    for candidates, wanted, cutoff in ((whole, "_".join(key), 0.7), (last, key[-1], 0.7), (whole, "_".join(key), 0.0)):
        found = get_close_matches(wanted, candidates, n=1, cutoff=cutoff)
        if found:
            return candidates[found[0]]
    raise AssertionError("a cutoff of 0 finds every key")


def _dotted(key: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")
