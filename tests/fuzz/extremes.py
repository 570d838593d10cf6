"""Inputs that are too much rather than broken, with the limits that a service has: they cost bounded memory and time as well.

Each runs in a process of its own, so that its memory is its own. The limits are those of `IntakeLimits`, which are the defaults.
"""

from __future__ import annotations

import asyncio
import gzip
import resource
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from statetap.adapters.datasets.arrow import ArrowDatasets
from statetap.adapters.datasets.tokenizer import TokenizerSource
from statetap.adapters.system_clock import SystemClock
from statetap.ports import DatasetRefused
from statetap_sglang.format import DumpFormatError
from statetap_sglang.reader import open_dump

from tests.fakes.datasets import make_tokenizer

MIB = 1 << 20
LINES = 10_000_000
MEMORY_MIB = 1024
SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Extreme:
    """How an input ended: in words, and what it cost."""

    name: str
    ending: str
    expected: str
    seconds: float
    peak_mib: int

    @property
    def fault(self) -> str | None:
        if self.expected not in self.ending:
            return f"ended with {self.ending!r}, not {self.expected!r}"
        if self.peak_mib > MEMORY_MIB or self.seconds > SECONDS:
            return f"took {self.seconds:.0f} s and {self.peak_mib} MiB"
        return None


def zip_bomb() -> Iterator[bytes]:
    """64 GiB of blank lines, in gzip members of 64 MiB: about a thousandth of it as sent."""
    member = gzip.compress((b" " * 999 + b"\n") * (64 * MIB // 1000), mtime=0)
    for _ in range(1024):
        yield member


def long_line() -> Iterator[bytes]:
    """A line of a GB."""
    yield b'{"text": "'
    for _ in range(1000):
        yield b"a" * 1_000_000
    yield b'"}\n'


def tiny_lines() -> Iterator[bytes]:
    block = b'{"input_ids":[5]}\n' * 50_000
    for _ in range(LINES // 50_000):
        yield block


def huge_header(folder: Path) -> str:
    """A dump that says that its header has 2^63 bytes."""
    path = folder / "req_0.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 63) + b"{}" * 100)
    try:
        with open_dump(path):
            return "taken"
    except DumpFormatError as refusal:
        return f"refused: {refusal}"


def intake(body: Callable[[], Iterator[bytes]], *, gzipped: bool = False) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        return asyncio.run(_take(folder, body(), gzipped=gzipped))

    return run


EXTREMES: dict[str, tuple[Callable[[Path], str], str]] = {
    "header of 2^63 bytes": (huge_header, "claims a header of 9223372036854775808 bytes"),
    "zip bomb": (intake(zip_bomb, gzipped=True), "refused: the gzip stream unpacks to more than 200 times its size"),
    "line of 1 GB": (intake(long_line), "refused: line 1: the line is longer than"),
    "10 million tiny lines": (intake(tiny_lines), f"taken: {LINES:,} samples"),
}


def run_extreme(name: str) -> Extreme:
    # A process each: what one has taken, the next must not be blamed for.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        ending = process.submit(_run, name).result()
        return Extreme(name, ending, EXTREMES[name][1], *process.submit(_cost).result())


def _run(name: str) -> str:
    with TemporaryDirectory(prefix="statetap-extremes-") as folder:
        return EXTREMES[name][0](Path(folder))


def _cost() -> tuple[float, int]:
    """CPU seconds of this process and its children, and the most memory that it had itself."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    # Not `ru_maxrss`: it begins with what the process had that started this one.
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    return sum(one.ru_utime + one.ru_stime for one in used), peak_kib >> 10


async def _take(folder: Path, body: Iterator[bytes], *, gzipped: bool) -> str:
    (folder / "model").mkdir()
    model = str(make_tokenizer(folder / "model", vocab_size=400))
    source = TokenizerSource(model, model)
    datasets = ArrowDatasets(folder / "datasets", lambda: {model: source}, clock=SystemClock())

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in body:
            yield chunk

    try:
        record = await datasets.ingest(chunks(), name="extreme", model=None, gzipped=gzipped, allow_empty_mask=False)
    except DatasetRefused as refusal:
        return f"refused: {refusal}"
    finally:
        await datasets.close()
    return f"taken: {record.samples:,} samples"
