"""What an examination is given of one worker: its server, its dump directory, and what is known of it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from statetap_sglang.beacon import Beacon

from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.ports import DumpSource, GenerateAnswer, GenerateSample


class Announced(Protocol):
    """What a worker captures of which model: a tap's beacon says it, or the declaration of a worker without one."""

    @property
    def model_path(self) -> str: ...
    @property
    def model_fingerprint(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def aux_layer_ids(self) -> Sequence[int]: ...
    @property
    def final(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def chunked_prefill_size(self) -> int | None: ...
    @property
    def context_length(self) -> int | None: ...


def capture_of(announced: Announced) -> CaptureSpec:
    return CaptureSpec(tuple(announced.aux_layer_ids), Final(announced.final))


def model_of(announced: Announced) -> ModelFacts:
    return ModelFacts(
        announced.model_path,
        announced.model_fingerprint,
        announced.num_layers,
        announced.hidden_size,
        announced.vocab_size,
        announced.dtype,
    )


def row_bytes(announced: Announced) -> int:
    """Bytes of hidden states that one token takes."""
    return capture_of(announced).row_bytes(model_of(announced))


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """A worker's dump directory as it is on this machine. Nothing was created or removed to learn this.

    `taps` are the beacons of living taps, `refusals` the reasons of those that do not publish, `faults` what is wrong with
    others; `neighbours` are what else is in the dump root. `held_bytes` are those of all files below the directory,
    `total_bytes` and `free_bytes` its file system's. `memory_limit_bytes` is that of the publisher's cgroup or of the machine,
    None if it is unknown.
    """

    path: Path
    exists: bool
    watched: bool = False
    neighbours: tuple[str, ...] = ()
    taps: tuple[Beacon, ...] = ()
    refusals: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    filesystem: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    memory_limit_bytes: int | None = None


class ExaminedServer(Protocol):
    """One worker's HTTP interface, as far as an examination needs it. Each call is bounded in time, and raises InferenceError."""

    async def settings(self) -> Mapping[str, Any]:
        """`/server_info`: every server argument, as resolved."""
        ...

    async def model(self) -> Mapping[str, Any]:
        """`/model_info`."""
        ...

    async def is_up(self) -> bool:
        """Whether it takes requests, asked without a forward pass."""
        ...

    async def requests_running(self) -> int | None:
        """Requests that it is working on or that wait, from `/v1/loads`; None where a server does not tell."""
        ...

    async def ask(self, samples: Sequence[GenerateSample], *, new_tokens: int, timeout_seconds: float) -> list[GenerateAnswer]:
        """One request for `new_tokens` tokens after each sample, at temperature 0 and past any end-of-text token."""
        ...

    async def abort(self, rid: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServiceView:
    """What a running service says of the worker."""

    state: str
    reason: str | None
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One worker to examine. `declared` is set for a worker of plain dumps, which has no beacon and is matched by count."""

    name: str
    url: str
    server: ExaminedServer
    source: DumpSource
    look_at_directory: Callable[[], DirectoryFacts]
    declared: Announced | None = None
    quiet_period_seconds: float = 0.0
    service: ServiceView | None = None

    @property
    def identity(self) -> Identity:
        return Identity.TOKENS if self.declared is None else Identity.COUNT
