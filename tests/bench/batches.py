"""Requests of several samples against requests of one: a service and an embedded worker with gaps as SGLang has them.

The worker idles for `GAP_SECONDS` after each pass, which is about what a prompt of 100 tokens takes it: as on a GPU, where such a
prompt runs for some milliseconds, and as long goes by until the next one is there. What is measured is read off the dumps.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from statetap_client.sync import SyncStatetapClient
from statetap_sglang.format import DumpFormatError
from statetap_sglang.reader import open_dump

from tests.bench.rows import Row
from tests.fakes.cluster import Cluster, cluster, small_model, token_samples

PROMPT_TOKENS = 100
GAP_SECONDS = 0.005
SAMPLES = 600
# Room for all samples: a unit's end is not what is measured here.
ROWS_PER_SHARD = 131_072
# By the end of these the size of requests is tuned.
WARM_UP_JOBS = 2
LOOK_SECONDS = 0.02


@dataclass(slots=True)
class Passes:
    """When the passes of a worker ran, in nanoseconds, and how many rows were published by them."""

    spans: set[tuple[int, int]] = field(default_factory=set)
    rows: int = 0

    @property
    def seconds(self) -> float:
        return (max(end for _, end in self.spans) - min(start for start, _ in self.spans)) / 1e9

    @property
    def busy_share(self) -> float:
        busy, until = 0, 0
        for start, end in sorted(self.spans):
            busy += max(end - max(start, until), 0)
            until = max(until, end)
        return busy / 1e9 / self.seconds


@contextmanager
def watched(directory: Path) -> Iterator[Passes]:
    """Reads the stamps of all dumps that appear below a worker's directory; they stay there until their unit is committed."""
    passes, over, seen = Passes(), threading.Event(), {path.name for path in directory.rglob("req_*.safetensors")}

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            for path in directory.rglob("req_*.safetensors"):
                if path.name not in seen:
                    seen.add(path.name)
                    with suppress(DumpFormatError, FileNotFoundError):
                        metadata = open_dump(path).metadata
                        passes.spans.add((metadata.forward_start_ns, metadata.forward_end_ns))
                        passes.rows += metadata.extend_len

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield passes
    finally:
        over.set()
        watcher.join()


def rows(folder: Path, rounds: int) -> list[Row]:
    """Tuned requests against those of one sample, in turn, over two services that are alive at once."""
    samples = token_samples(SAMPLES, longest=PROMPT_TOKENS, shortest=PROMPT_TOKENS)
    home = Path(tempfile.mkdtemp(prefix="batches-", dir=folder))
    measured: dict[str, list[Passes]] = {"tuned": [], "alone": []}
    try:
        model = small_model(home / "model")
        with ExitStack() as stack:
            tuned, tuned_client = stack.enter_context(_service(home / "tuned", model))
            alone, alone_client = stack.enter_context(_service(home / "alone", model, max_batch_tokens=0))
            sides = {"tuned": (tuned, tuned_client), "alone": (alone, alone_client)}
            for number in range(-WARM_UP_JOBS, rounds):
                for name, (made, client) in sides.items():
                    with watched(made.dumps / name) as passes:
                        job = made.run_job(client, samples, f"{number}.zarr", rows_per_shard=ROWS_PER_SHARD, rows_per_chunk=1024)
                    assert (job.state, job.progress.samples.stored) == ("completed", SAMPLES), job
                    if number >= 0:
                        measured[name].append(passes)
            tokens = [line["max_batch_tokens"] for line in tuned.log("worker.batch_tuned")]
    finally:
        shutil.rmtree(home)
    speeds = {name: statistics.median(p.rows / p.seconds for p in of) for name, of in measured.items()}
    shares = {name: statistics.median(p.busy_share for p in of) for name, of in measured.items()}
    pairs = zip(measured["tuned"], measured["alone"], strict=True)
    gains = statistics.median((t.rows / t.seconds) / (a.rows / a.seconds) for t, a in pairs)
    return [
        Row(
            "engine runs a pass, self-tuned batches",
            shares["tuned"],
            "of the time",
            at_least=0.97,
            details={
                "engine runs a pass, one sample a request, of the time": shares["alone"],
                "tuned to, tokens a request": tokens[-1] if tokens else 0,
            },
        ),
        Row(
            "several samples a request against one, 100-token prompts, tokens/s",
            gains,
            "x",
            at_least=2.0,
            details={
                "self-tuned batches, tokens/s": speeds["tuned"],
                "one sample a request, tokens/s": speeds["alone"],
            },
        ),
    ]


@contextmanager
def _service(home: Path, model: Path, **runtime: object) -> Iterator[tuple[Cluster, SyncStatetapClient]]:
    home.mkdir()
    with cluster(home, model, **runtime) as made:
        flags = ("--layers", "0,1", "--chunked-prefill-size", "8192", "--gap-seconds", str(GAP_SECONDS))
        made.log_level = "info"
        made.start_worker(home.name, *flags)
        with made.start_service() as client:
            made.wait_for_workers(client, home.name)
            yield made, client
