"""A worker for examinations, in memory: it runs prompts in passes as a scheduler does, and has whatever fault a test asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from statetap.core.dumps import DumpFacts
from statetap.core.spec import Identity
from statetap.ports import GenerateAnswer, GenerateSample, RequestTimedOut, WorkerUnreachable
from statetap.runtime.doctor.inputs import DirectoryFacts, Examined, capture_of, model_of
from statetap_sglang.beacon import Beacon
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import TensorView

from tests.fakes.dumps import FakeDumpSource, make_beacon

BEACON = make_beacon(
    hidden_size=16, num_layers=8, aux_layer_ids=(1, 7), dtype="float32", chunked_prefill_size=64, plugin_version="0.1.0"
)


class QuickClock:
    """Nobody waits: a sleep lets the others have a turn, and then so much time has passed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sleeps = 0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        assert max(self.seconds, self.sleeps) < 1000, "somebody waits for ever"
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.seconds += seconds
        self.sleeps += 1


@dataclass
class Faults:
    """What is wrong with a worker. `weights` other than 1 is another model, `shift` captures so many layers further up."""

    dead: bool = False
    starting: bool = False
    hangs: bool = False
    publishes: bool = True
    names_dumps: tuple[str, ...] | None = None
    loses: str | None = None
    ignores_extra_key: bool = False
    decode_rows: bool = False
    wrong_tokens: bool = False
    not_finite: bool = False
    weights: float = 1.0
    shift: int = 0
    norm_of_norm: bool = False
    drifts: float = 0.0
    chunk_error: float = 0.0
    checksums: bool = True
    torn: bool = False
    foreign_traffic: bool = False


@dataclass
class FakeExamined:
    """Implements `ExaminedServer`, and publishes into `source`. `requests` are what it was sent, oldest first."""

    beacon: Beacon = BEACON
    identity: Identity = Identity.TOKENS
    faults: Faults = field(default_factory=Faults)
    arguments: dict[str, Any] = field(default_factory=dict)
    running: int | None = 0
    source: FakeDumpSource = field(default_factory=FakeDumpSource)
    requests: list[list[GenerateSample]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    in_flight: int = 0
    published: int = 0
    seen: set[bytes] = field(default_factory=set)

    async def settings(self) -> Mapping[str, Any]:
        self._reach()
        return {
            "version": self.beacon.sglang_version,
            "dtype": self.beacon.dtype,
            "disable_radix_cache": not self.beacon.radix_cache,
            "chunked_prefill_size": self.beacon.chunked_prefill_size or -1,
            **self.arguments,
        }

    async def model(self) -> Mapping[str, Any]:
        return {"model_path": self.beacon.model_path, "is_generation": True}

    async def is_up(self) -> bool:
        return not self.faults.starting

    async def requests_running(self) -> int | None:
        return self.running

    async def ask(self, samples: Sequence[GenerateSample], *, new_tokens: int, timeout_seconds: float) -> list[GenerateAnswer]:
        self._reach()
        assert self.in_flight == 0, "a second request while one is in flight"
        self.in_flight = 1
        self.requests.append(list(samples))
        if self.faults.hangs:
            self.in_flight = 0
            raise RequestTimedOut(f"no answer within {timeout_seconds:g} s")
        cached = [self._cached(sample) for sample in samples]
        self._run(samples, new_tokens, cached)
        self.in_flight = 0
        names = None if self.faults.names_dumps is None else frozenset(self.faults.names_dumps)
        return [
            GenerateAnswer(sample.rid, len(sample.token_ids), hit, 7, names) for sample, hit in zip(samples, cached, strict=True)
        ]

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def close(self) -> None:
        pass

    def examined(self, name: str = "a", **changes: Any) -> Examined:
        directory = DirectoryFacts(
            path=Path("/dumps") / name,
            exists=True,
            taps=(self.beacon,) if self.identity is Identity.TOKENS else (),
            filesystem="tmpfs",
            total_bytes=8 << 30,
            free_bytes=8 << 30,
            memory_limit_bytes=64 << 30,
        )
        return Examined(
            name=name,
            url=f"http://127.0.0.1:{id(self)}",
            server=self,
            source=self.source,
            look_at_directory=lambda: replace(directory, **changes),
            declared=self.beacon if self.identity is Identity.COUNT else None,
        )

    def _reach(self) -> None:
        if self.faults.dead:
            raise WorkerUnreachable("connection refused")

    def _cached(self, sample: GenerateSample) -> int:
        ids = sample.token_ids.tobytes()
        hit = len(sample.token_ids) - 1 if self.faults.ignores_extra_key and ids in self.seen else 0
        self.seen.add(ids)
        return hit

    def _run(self, samples: Sequence[GenerateSample], new_tokens: int, cached: Sequence[int]) -> None:
        """Prompts in order, up to a chunk a pass; the last of a pass may be split."""
        chunk = self.beacon.chunked_prefill_size or 1 << 30
        room = chunk
        for sample, hit in zip(samples, cached, strict=True):
            start = hit
            while start < len(sample.token_ids):
                stop = min(len(sample.token_ids), start + room)
                self._publish(sample, start, stop, split=start > 0)
                room = room - (stop - start) or chunk
                start = stop
            if self.faults.decode_rows:
                for position in range(new_tokens - 1):
                    self._publish(sample, len(sample.token_ids) + position, len(sample.token_ids) + position + 1)
            if self.faults.foreign_traffic:
                self._publish(GenerateSample("somebody", sample.token_ids[::-1], "k"), 0, len(sample.token_ids))

    def _publish(self, sample: GenerateSample, start: int, stop: int, *, split: bool = False) -> None:
        if self.faults.loses is not None:
            self.source.lose(sample.rid, self.faults.loses)
            return
        if not self.faults.publishes:
            return
        number, self.published = self.published, self.published + 1
        ids = np.concatenate([sample.token_ids, np.zeros(max(0, stop - len(sample.token_ids)), np.int32)])
        arrays = self._arrays(ids[:stop])
        capture, model = capture_of(self.beacon), model_of(self.beacon)
        views = {
            name: (values[start:stop] * (1 + self.faults.chunk_error * split)).astype("<f4") for name, values in arrays.items()
        }
        if self.faults.not_finite:
            next(iter(views.values()))[0, 0] = np.nan
        tensors = {name: TensorView("F32", values.shape, values.data.cast("B")) for name, values in views.items()}
        sums = row_checksums(tensors) + self.faults.torn
        plain = self.identity is Identity.COUNT
        rows = ids[start:stop] + self.faults.wrong_tokens
        facts = DumpFacts(
            dump_id=f"tap/{number}",
            sequence=number,
            rows=stop - start,
            nbytes=sum(values.nbytes for values in views.values()),
            tensors=tuple((name, "float32", values.shape) for name, values in views.items()),
            capture=capture,
            model_fingerprint=model.model_fingerprint,
            rid=None if plain else sample.rid,
            prefix_len=0 if plain else start,
            prompt_len=None if plain else len(sample.token_ids),
            token_ids=None if plain else rows.astype("<i4").tobytes(),
            name=None if plain else f"tap/req_{number}",
        )
        carried = sums.tobytes() if self.faults.checksums and not plain else None
        self.source.put(facts, {name: tensor.data for name, tensor in tensors.items()}, carried)

    def _arrays(self, ids: NDArray[np.int32]) -> dict[str, NDArray[np.float64]]:
        """States that depend on all tokens up to a row and on the layer, in the dump's order."""
        drift = 1 + self.faults.drifts * self.published
        history = np.cumsum(ids)[:, None] * self.faults.weights

        def layer(index: int) -> NDArray[np.float64]:
            return np.sin(history * (index + 1 + self.faults.shift) * np.arange(1, self.beacon.hidden_size + 1) / 7) * drift

        last = layer(self.beacon.num_layers - 1)
        normed = last / np.linalg.norm(last, axis=1, keepdims=True)
        return {
            "aux_hidden_states": np.stack([layer(index) for index in self.beacon.aux_layer_ids], axis=1),
            "last_hidden_states": normed,
            "last_hidden_states_prenorm": normed * 2 if self.faults.norm_of_norm else last,
        }
