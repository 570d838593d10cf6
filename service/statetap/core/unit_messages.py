"""What goes into the unit machine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from statetap.core.capture import Refusal
from statetap.core.dumps import DumpFacts
from statetap.core.records import SampleVerdict, ShardObject
from statetap.core.spec import Identity


class Fault(StrEnum):
    """What a failed attempt counts as: the sample's own fault, which is final, or one attempt used up.

    Or nobody's, which uses up nothing: there was no room for the dump, or the service itself gave the attempt up. `company`: its
    request of several samples failed as a whole, which uses up nothing either, and is held against the worker as one failure.
    """

    SAMPLE = "sample"
    ATTEMPT = "attempt"
    NOBODY = "nobody"
    COMPANY = "company"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assigned:
    """A worker is free for this sample. `chunk` and `probation` as in `Attempt`."""

    sample: int
    worker: str
    identity: Identity
    chunk: int | None
    probation: bool = False


@dataclass(frozen=True, slots=True)
class Recalled:
    """An attempt of an earlier lease was answered; its dumps, if they are still there, follow."""

    rid: str
    sample: int
    worker: str
    next_token: int


@dataclass(frozen=True, slots=True)
class RecallEnded:
    """Every dump of recalled attempts that is still there has been reported."""


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """`named` are the dumps that the worker says it published for the request, None if it says nothing of them."""

    rid: str
    prompt_tokens: int
    cached_tokens: int
    next_token: int
    named: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    rid: str
    reason: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class DumpPublished:
    """A dump for the attempt `rid`; a plain dump has no rid of its own and is given that of the lifecycle it appeared in."""

    rid: str
    dump: DumpFacts


@dataclass(frozen=True, slots=True)
class CaptureLost:
    """The publisher said that it could not publish."""

    rid: str
    reason: str
    fault: Fault = Fault.ATTEMPT


@dataclass(frozen=True, slots=True)
class LifecycleClosed:
    """Strict mode: the quiet period is over and everything that is visible was reported."""

    rid: str


@dataclass(frozen=True, slots=True)
class CaptureOverdue:
    """The answer has been there for long enough; what is missing will not come."""

    rid: str


@dataclass(frozen=True, slots=True)
class DumpsDigested:
    rid: str
    digests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CaptureInspected:
    rid: str
    digest: int
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class FailuresForgiven:
    """So many of a sample's attempts that used up its budget turned out to be a worker's fault."""

    sample: int
    failures: int


@dataclass(frozen=True, slots=True)
class UnitWritten:
    objects: tuple[ShardObject, ...]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Nothing is visible of the attempt to write. Final: it makes no sense to try again."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class CommitRecorded:
    pass


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The lease is over: given back, lost, or the service stops. `release`: its dumps are of no more use to anybody."""

    reason: str
    release: bool


# Events about one attempt, named by its rid. They may come late, or after the attempt was given up.
AttemptEvent = RequestAnswered | RequestFailed | CaptureLost | LifecycleClosed | CaptureOverdue | DumpsDigested | CaptureInspected
UnitEvent = (
    Assigned
    | Recalled
    | RecallEnded
    | DumpPublished
    | AttemptEvent
    | FailuresForgiven
    | UnitWritten
    | WriteFailed
    | CommitRecorded
    | Abandoned
)


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Ask the worker. Brings RequestAnswered or RequestFailed."""

    rid: str
    sample: int
    worker: str


@dataclass(frozen=True, slots=True)
class CloseLifecycle:
    """Strict mode: wait out the quiet period, look at the directory once more. Brings LifecycleClosed."""

    rid: str


@dataclass(frozen=True, slots=True)
class DigestDumps:
    """Brings DumpsDigested."""

    rid: str
    dump_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InspectCapture:
    """Look at the values. Brings CaptureInspected."""

    rid: str
    dump_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaptureAccepted:
    """To be told: a sample has its capture."""

    rid: str
    sample: int
    worker: str
    recalled: bool


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """To be told: an attempt failed; `final` if the sample failed with it."""

    rid: str
    sample: int
    worker: str
    reason: str
    final: bool
    fault: Fault = Fault.ATTEMPT


@dataclass(frozen=True, slots=True)
class WriteUnit:
    """Write the captures: (sample, its dumps in row order). Brings UnitWritten or WriteFailed."""

    captures: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class RecordCommit:
    """Record the unit in the ledger. Brings CommitRecorded, or Abandoned if the lease is lost."""

    verdicts: tuple[SampleVerdict, ...]
    objects: tuple[ShardObject, ...]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The unit cannot be finished here. Brings Abandoned."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseDumps:
    """Remove these dumps from their directory. `stray`: they never belonged to a committed capture."""

    dump_ids: tuple[str, ...]
    stray: bool


UnitCommand = (
    SendRequest
    | CloseLifecycle
    | DigestDumps
    | InspectCapture
    | CaptureAccepted
    | AttemptFailed
    | WriteUnit
    | RecordCommit
    | GiveBack
    | ReleaseDumps
)
