"""One worker's dump directory, watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from statetap.core.dumps import DumpFacts
from statetap.core.spec import CaptureSpec, Identity, ModelFacts


class Dump(Protocol):
    """A published dump, mapped: `views` are its hidden tensors' bytes, read-only, rows first, without a copy.

    `row_checksums` is what its source computed of its rows (`CapturePart`), None where it gave none.
    """

    @property
    def facts(self) -> DumpFacts: ...

    @property
    def views(self) -> Mapping[str, memoryview]: ...

    @property
    def row_checksums(self) -> memoryview | None: ...

    def release(self) -> None:
        """Drop the mapping and remove it from the directory: its bytes are free again. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class TapSeen:
    """A tap announced itself, or is there at start: a new boot of the worker, or another data-parallel rank.

    `chunked_prefill_size` and `context_length` in tokens, None if there is no limit or it is not known. The taps of one `boot`
    are its ranks 0 to `dp_size` - 1; a declared tap is a boot of one rank, without a name. `announced_ns` is when it
    did so, in nanoseconds since the epoch.
    """

    tap: str
    capture: CaptureSpec
    model: ModelFacts
    identity: Identity
    budget_bytes: int
    context_length: int | None
    chunked_prefill_size: int | None
    alive: bool
    """Whether a publisher holds the tap's lock; a dead boot's dumps may still be wanted."""
    boot: str = ""
    dp_rank: int = 0
    dp_size: int = 1
    announced_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class TapRefused:
    """A tap says that it does not publish, and why; it may have announced itself before. The other fields as in `TapSeen`."""

    tap: str
    boot: str
    reason: str
    alive: bool
    announced_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class DumpSeen:
    dump: Dump


@dataclass(frozen=True, slots=True)
class CaptureLost:
    """The publisher could not publish a capture and said so. For want of room: once there is some, it can."""

    rid: str
    reason: str
    for_want_of_room: bool = False


@dataclass(frozen=True, slots=True)
class DumpRejected:
    """A file that is no dump: torn, malformed, foreign. It was removed where it was Statetap's to remove."""

    name: str
    reason: str


DumpEvent = TapSeen | TapRefused | DumpSeen | CaptureLost | DumpRejected


class DumpSource(Protocol):
    """Watches one worker's dumps: every complete one is reported, once. It rescans on overflow, and now and then."""

    async def start(self, post: Callable[[DumpEvent], None]) -> None:
        """Report what is there, then what comes, each through `post`, called on the event loop in directory order.

        Raises:
            DumpSourceError: the directory is missing, not ours, or open to others.
        """
        ...

    async def rescan(self) -> None:
        """Look at the whole directory now; when it returns, everything visible before the call was posted."""
        ...

    async def close(self) -> None: ...


class DumpSourceError(Exception):
    """A dump directory that cannot be used: the message names it, why, and the way out."""
