"""`python -m tests.bench.stand_ins`: many SGLang-like servers in one process, so cheap that what is measured is the service.

Each has a port of its own, answers `/generate` after a given time and publishes what a real worker would: plugin dumps through
the plugin's own publisher, or plain ones. Hidden states are slices of bytes made once. It runs until SIGTERM; `GET /moments` at
any port says when everything happened (`Moments`), by the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from statetap_sglang.beacon import Beacon
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import MODEL_DTYPES, ROW_CHECKSUMS, TOKEN_IDS, TensorView
from statetap_sglang.free_files import RECYCLE_FROM_BYTES
from statetap_sglang.plain import PlainLayout, PlainPublisher
from statetap_sglang.publisher import DumpPublisher

from tests.bench.facts import CONTEXT_LENGTH, FINAL, LAYERS, MODEL, PLAIN_DIR, READY, VOCAB_SIZE, boot_of, worker_names
from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

_SERVER = orjson.dumps({"version": "0.5.23", "model_path": MODEL, "max_req_input_len": CONTEXT_LENGTH})
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@dataclass(slots=True)
class Moments:
    """When a worker's requests were there, their dumps visible, and their answers sent: nanoseconds, one entry a request."""

    arrived: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)


class States:
    """Rows to publish: slices of the same random bytes, without infinities, with their checksums."""

    def __init__(self, beacon: Beacon, longest: int) -> None:
        made = make_tensors(beacon, longest)
        self._bits = {
            name: (np.frombuffer(view.data, np.uint16) & 0xBFFF).reshape(view.shape)
            for name, view in made.items()
            if name != TOKEN_IDS
        }
        self._dtype = MODEL_DTYPES[beacon.dtype]
        self._sums = row_checksums(self.hidden(longest))

    def first_row(self, tokens: np.ndarray) -> int:
        """Where in the bytes a sample's rows begin."""
        return 0

    def hidden(self, rows: int, first: int = 0) -> dict[str, TensorView]:
        taken = {name: bits[first : first + rows] for name, bits in self._bits.items()}
        return {name: TensorView(self._dtype, bits.shape, bits.reshape(-1).view(np.uint8).data) for name, bits in taken.items()}

    def of(self, tokens: np.ndarray) -> dict[str, TensorView]:
        rows, first = len(tokens), self.first_row(tokens)
        sums = TensorView("I64", (rows,), self._sums[first : first + rows].data.cast("B"))
        return {TOKEN_IDS: TensorView("I32", (rows,), tokens.data.cast("B")), **self.hidden(rows, first), ROW_CHECKSUMS: sums}


class StandIn:
    """One worker. `answer_first`: by that many seconds its dumps come after its answers, not before them."""

    def __init__(self, name: str, root: Path, beacon: Beacon, states: States, delay: float, *, plain: bool, lag: float) -> None:
        self.moments = Moments()
        self._delay = delay
        self._lag = lag
        self._states = states
        self._boot = beacon.boot_id
        self._plain: PlainPublisher | None = None
        self._publisher: DumpPublisher | None = None
        if plain:
            layout = PlainLayout.default(aux_layers=len(beacon.aux_layer_ids), final=beacon.final)
            self._plain = PlainPublisher(root / PLAIN_DIR / name, layout)
        else:
            self._publisher = DumpPublisher(root, name, beacon)
            self._publisher.announce()

    def generate(self, body: bytes, transport: asyncio.Transport) -> None:
        """Take a request of one sample."""
        self.moments.arrived.append(time.monotonic_ns())
        asked = orjson.loads(body)
        asyncio.get_running_loop().call_later(self._delay, self._pass_is_over, asked, transport)

    def _pass_is_over(self, asked: dict[str, object], transport: asyncio.Transport) -> None:
        rid, tokens = str(asked["rid"]), np.array(asked["input_ids"], np.int32)
        if self._lag:
            self._answer(rid, len(tokens), transport)
            asyncio.get_running_loop().call_later(self._lag, self._publish, rid, tokens)
        else:
            self._publish(rid, tokens)
            self._answer(rid, len(tokens), transport)

    def _publish(self, rid: str, tokens: np.ndarray) -> None:
        if self._plain is not None:
            self._plain.publish(self._states.hidden(len(tokens)))
        elif self._publisher is not None:
            metadata = make_metadata(rid, len(tokens), boot_id=self._boot, prompt_len=len(tokens))
            self._publisher.publish(metadata, self._states.of(tokens))
        self.moments.published.append(time.monotonic_ns())

    def _answer(self, rid: str, rows: int, transport: asyncio.Transport) -> None:
        meta = {"id": rid, "prompt_tokens": rows, "cached_tokens": 0, "finish_reason": {"type": "length"}}
        body = orjson.dumps({"output_ids": [7], "meta_info": meta})
        self.moments.answered.append(time.monotonic_ns())
        transport.write(_OK % (len(body), body))


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as the service's client speaks it: one request at a time, bodies with their length."""

    def __init__(self, worker: StandIn, all_workers: dict[str, StandIn]) -> None:
        self._worker = worker
        self._all = all_workers
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
        if len(rest) < length:
            return
        self._buffer = b""
        path = head.split(b" ", 2)[1]
        if path == b"/generate":
            self._worker.generate(rest, self._transport)
        else:
            self._transport.write(self._page(path))

    def _page(self, path: bytes) -> bytes:
        if path in (b"/server_info", b"/model_info"):
            return _OK % (len(_SERVER), _SERVER)
        if path == b"/moments":
            body = orjson.dumps({name: worker.moments for name, worker in self._all.items()})
            return _OK % (len(body), body)
        return _OK % (2, b"{}") if path in (b"/ping", b"/abort_request") else _NOT_FOUND


def beacon_of(name: str, hidden: int, budget_bytes: int) -> Beacon:
    return make_beacon(
        boot_id=boot_of(name),
        model_path=MODEL,
        aux_layer_ids=LAYERS,
        final=FINAL,
        hidden_size=hidden,
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT_LENGTH,
        pid=os.getpid(),
        budget_bytes=budget_bytes,
        recycle_from_bytes=RECYCLE_FROM_BYTES,
    )


async def serve(options: argparse.Namespace, make_states: Callable[[Beacon, int], States]) -> None:
    beacons = {name: beacon_of(name, options.hidden, options.budget_bytes) for name in worker_names(options.workers)}
    states = make_states(next(iter(beacons.values())), options.longest)
    workers = {
        name: StandIn(name, options.root, beacon, states, options.delay, plain=options.plain, lag=options.lag)
        for name, beacon in beacons.items()
    }
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda w=w: Connection(w, workers), "127.0.0.1", 0) for w in workers.values()]
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    gc.freeze()
    print(orjson.dumps({"event": READY, "ports": ports}).decode(), flush=True)
    await stop.wait()


def main(make_states: Callable[[Beacon, int], States] = States) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--delay", type=float, required=True, help="seconds from a request to its dump")
    parser.add_argument("--plain", action="store_true", help="plain dumps instead of the plugin's")
    parser.add_argument("--lag", type=float, default=0.0, help="seconds by which a dump comes after its answer")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sample")
    parser.add_argument("--budget-bytes", type=int, default=1 << 30)
    asyncio.run(serve(parser.parse_args(), make_states))


if __name__ == "__main__":
    main()
