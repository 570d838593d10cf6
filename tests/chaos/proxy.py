"""A reverse proxy in front of one worker, which does to each request what it is told; and the thread that all proxies run in."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web
from statetap.core.capture import RefusalReason
from statetap.core.requests import RequestName

from tests.chaos.relay import DUMP_FAULTS, Relay

R = RefusalReason
FAILED = frozenset({R.REQUEST_FAILED})
SWEEP_SECONDS = 0.05
DELAY_SECONDS = 0.4
LATE_SECONDS = 0.6
# Beyond the cluster's time limits, for a request and for a capture.
HANG_SECONDS = 9.0
TOO_LATE_SECONDS = 6.0

PROXY_FAULTS: Mapping[str, frozenset[RefusalReason]] = {
    "request delayed": frozenset(),
    "request dropped": FAILED,
    "request sent twice": frozenset(),
    "answer lost": FAILED,
    "answer truncated": FAILED,
    "answer garbled": FAILED,
    "error 500": FAILED,
    "error 400": FAILED,
    "request hangs": FAILED,
}
FAULTS = PROXY_FAULTS | DUMP_FAULTS


class Schedule:
    """Which fault befalls which request, by its number over all workers, or by its sample, for ever; and what was asked."""

    def __init__(self, faults: Mapping[int, str] | None = None, doomed: Mapping[int, str] | None = None) -> None:
        self.faults = dict(faults or {})
        self.doomed = dict(doomed or {})
        self.asked: Counter[int] = Counter()
        self.hits: dict[int, list[frozenset[RefusalReason]]] = defaultdict(list)
        self.took_effect: list[str] = []
        self.everywhere: frozenset[RefusalReason] = frozenset()
        """Reasons that a disturbance of the whole (a full disk, a stopped worker) may give to any request just now."""
        self._requests = 0

    def next(self, sample: int) -> str | None:
        number, self._requests = self._requests, self._requests + 1
        self.asked[sample] += 1
        fault = self.doomed.get(sample) or self.faults.pop(number, None)
        reasons = self.everywhere
        if fault is not None:
            self.took_effect.append(f"{fault}, for ever" if sample in self.doomed else fault)
            reasons |= FAULTS[fault]
        if reasons:
            self.hits[sample].append(reasons)
        return fault

    def share(self, fault: str, samples: Collection[int]) -> None:
        """What befalls a request befalls these samples of it as well."""
        for sample in samples:
            if FAULTS[fault]:
                self.hits[sample].append(FAULTS[fault])

    def disturb(self, reasons: frozenset[RefusalReason]) -> None:
        """From now on, and until it is called with no reasons. What is in flight is disturbed as well."""
        self.everywhere = reasons
        if reasons:
            for sample in self.asked:
                self.hits[sample].append(reasons)


class Proxy:
    """`upstream_port` may change: a worker that is started again may have another one."""

    def __init__(self, relay: Relay, upstream_port: int) -> None:
        self.relay = relay
        self.upstream_port = upstream_port
        self.schedule = Schedule()
        self.port = 0
        self._awaited: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._spawn(self._sweep())

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()
        await self._session.close()
        self.relay.close()

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        while True:
            with suppress(OSError):  # a full file system, or a directory that goes: it is tried again
                self.relay.pass_on(self._awaited)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path != "/generate":
            return await self._forward(request, body)
        rids = orjson.loads(body)["rid"]
        names = {rid: RequestName.parse(rid) for rid in ([rids] if isinstance(rids, str) else rids)}
        faults = {rid: self.schedule.next(name.sample) if name is not None else None for rid, name in names.items()}
        # The first fault that befalls the whole request; each dump may have one of its own.
        whole = next((rid for rid, fault in faults.items() if fault in PROXY_FAULTS), None)
        fault = faults[whole] if whole is not None else None
        if fault is not None:
            self.schedule.share(fault, [name.sample for rid, name in names.items() if name is not None and rid != whole])
        self._awaited.update(names)
        try:
            return await self._generate(request, body, fault, faults)
        finally:
            self._awaited.difference_update(names)

    async def _generate(
        self, request: web.Request, body: bytes, fault: str | None, faults: Mapping[str, str | None]
    ) -> web.StreamResponse:
        match fault:
            case "request delayed":
                await asyncio.sleep(DELAY_SECONDS)
            case "request dropped":
                return _cut(request)
            case "error 500" | "error 400":
                return web.Response(status=int(fault[-3:]), text='{"error": {"message": "by the schedule"}}')
            case "request sent twice":
                await self._forward(request, body)
        answer = await self._forward(request, body)
        for rid, of_dump in faults.items():
            for publish in self.relay.publish(rid, of_dump if of_dump in DUMP_FAULTS else None):
                self._spawn(_after(LATE_SECONDS if of_dump == "dump late" else TOO_LATE_SECONDS, publish))
        match fault:
            case "answer lost":
                return _cut(request)
            case "answer garbled":
                return web.Response(body=answer.body[:-3] if isinstance(answer.body, bytes) else b"", status=answer.status)
            case "answer truncated":
                return await _truncated(request, answer)
            case "request hangs":
                await asyncio.sleep(HANG_SECONDS)
        return answer

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        url = f"http://127.0.0.1:{self.upstream_port}{request.path_qs}"
        headers = {"Content-Type": request.headers["Content-Type"]} if "Content-Type" in request.headers else {}
        try:
            async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError:
            _cut(request)
            return web.Response(status=502)


def _cut(request: web.Request) -> web.Response:
    """End the connection without a word."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


async def _truncated(request: web.Request, answer: web.Response) -> web.StreamResponse:
    body = answer.body if isinstance(answer.body, bytes) else b""
    response = web.StreamResponse(status=answer.status, headers={"Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    _cut(request)
    return response


async def _after(seconds: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    act()


class ProxyThread:
    """Runs proxies beside a harness that is not asynchronous."""

    def __init__(self) -> None:
        self.proxies: dict[str, Proxy] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def put_before(self, worker: str, port: int, private: Path, served: Path) -> Proxy:
        """Put a proxy before a worker, or the one that is there before its new port."""
        if worker in self.proxies:
            self.proxies[worker].upstream_port = port
            return self.proxies[worker]
        proxy = self.proxies[worker] = Proxy(Relay(private, served, worker), port)
        asyncio.run_coroutine_threadsafe(proxy.start(), self._loop).result(30)
        return proxy

    def follow(self, schedule: Schedule) -> None:
        for proxy in self.proxies.values():
            proxy.schedule = schedule

    def stop(self) -> None:
        for proxy in self.proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
