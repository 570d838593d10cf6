"""What a rehearsal is held against, and the table of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from statetap.adapters.datasets.arrow_file import RESIDENT_BYTES

from tests.soak.verdict import MIB, WARM_UP, Criterion, flat, none, table

FULL_SAMPLES, FULL_HIDDEN = 37_000, 7168
# Code that is read in when it runs for the first time.
CODE_BYTES = 16 * MIB


@dataclass(frozen=True)
class Look:
    """One look at the service; sizes are bytes of resident pages, by what they are of.

    `files` are its libraries and the dataset's last windows, which come and go; `shared` are mapped dumps.
    """

    seconds: float
    stored: int
    anonymous: int
    files: int
    shared: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal found. `seconds` are from submission to the job's end, the first `planning_seconds` without a request.

    `object_bytes` are those of all shard objects, of which `row_bytes` for each token are hidden states; with `null` only
    those that are read back were written. `budget_bytes` is what a worker's dumps may take.
    """

    samples: int
    tokens: int
    row_bytes: int
    hidden: int
    workers: int
    budget_bytes: int
    null: bool
    state: str
    stored: int
    units: int
    read_back: int
    wrong_records: tuple[str, ...]
    wrong_bytes: tuple[str, ...]
    left: tuple[str, ...]
    looks: Sequence[Look]
    seconds: float
    planning_seconds: float
    service_cpu_seconds: float
    object_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.row_bytes

    def criteria(self) -> Iterator[Criterion]:
        met = self.stored == self.samples and self.state == "completed"
        yield Criterion("samples stored", f"{self.stored:,}, {self.state}", f"{self.samples:,}, completed", met)
        yield none("samples with another status, place or digest in the store than they must have", self.wrong_records)
        yield Criterion("samples read back before removal", f"{self.read_back:,}", "1 or more", self.read_back > 0)
        yield none("of them, and of all objects, missing or with other bytes than published", self.wrong_bytes)
        warm = self.looks[int(len(self.looks) * WARM_UP) :]
        yield flat(warm, "memory of its own (RssAnon)", "anonymous", MIB, "MiB")
        yield flat(warm, "descriptors", "descriptors")
        yield flat(warm, "threads", "threads")
        yield self._mapped_files()
        yield self._mapped_dumps()
        yield none("dumps and shard objects left", self.left)

    def _mapped_files(self) -> Criterion:
        first, most = self.looks[0].files, max(look.files for look in self.looks)
        wanted = first + RESIDENT_BYTES + CODE_BYTES
        found = f"{first / MIB:,.1f}, at most {most / MIB:,.1f} MiB"
        return Criterion("service: mapped files", found, f"≤ {wanted / MIB:,.1f} MiB", most <= wanted)

    def _mapped_dumps(self) -> Criterion:
        """They come and go with the units that are open, how many of which depends on the disk; never more than was reserved."""
        most, wanted = max(look.shared for look in self.looks), self.workers * self.budget_bytes
        found = f"at most {most / MIB:,.0f} MiB"
        return Criterion("service: mapped dumps", found, f"≤ {wanted / MIB:,.0f} MiB, the workers' budgets", most <= wanted)

    @property
    def short(self) -> list[Criterion]:
        return [criterion for criterion in self.criteria() if not criterion.met]

    def table(self) -> Table:
        return table(
            self.criteria(), f"{scale(self.samples, self.hidden, self.tokens, self.nbytes)}\n{self._rates()}", self._caption()
        )

    def _rates(self) -> str:
        working = self.seconds - self.planning_seconds
        return (
            f"{working:,.0f} s of work: {self.samples / working:,.1f} samples/s, {self.tokens / working:,.0f} tokens/s, "
            f"{self.nbytes / working / 1e9:.2f} GB/s"
        )

    def _caption(self) -> str:
        done = "assembled" if self.null else "written and removed"
        return (
            f"{self.units:,} units on {self.workers} workers after {self.planning_seconds:.1f} s of planning; "
            f"{self.object_bytes / 1e9:,.1f} GB of shard objects {done}. The service took "
            f"{self.service_cpu_seconds:,.0f} CPU-s: {self.service_cpu_seconds / (self.nbytes / 1e9):.2f} a GB. "
            f"{len(self.looks)} looks"
        )


def scale(samples: int, hidden: int, tokens: int, nbytes: int) -> str:
    """How large a rehearsal is, and what it is of the whole job."""
    share = f"{samples / FULL_SAMPLES:.0%} of the count, {hidden / FULL_HIDDEN:.0%} of the width"
    return f"{samples:,} samples, {tokens:,} tokens, H = {hidden}, {nbytes / 1e9:,.1f} GB of hidden states ({share})"
