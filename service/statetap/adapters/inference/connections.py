"""HTTP/1.1 to one server: a request, its reply, and a connection that is kept for the next one.

As much of HTTP as it takes to ask a worker, on asyncio's own protocol: a request is one write, a reply one future, a time-out one
timer. What a general client does beside that costs more than all of it, for each of millions of requests.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cache

from yarl import URL

from statetap.adapters.inference.replies import BadReply, Reply, ReplyReader

KEEP_ALIVE_SECONDS = 2.0
"""Below the 5 s after which SGLang closes an idle connection, so that no request is sent into one that is being closed."""
HAPPY_EYEBALLS_SECONDS = 0.25


class NoConnection(Exception):
    """None could be made, it broke before the whole reply was here, or what came is no reply. The message says what happened."""


@cache
def _trusted_authorities() -> ssl.SSLContext:
    """Those that the system trusts, read once: that takes a tenth of a second."""
    return ssl.create_default_context()


class Connections:
    """To the server at `url` (http or https; its path does not matter here). `headers` go with every request.

    Any number of requests may be under way, each on a connection of its own; those that are done with are used again.
    """

    def __init__(self, url: URL, headers: dict[str, str], *, connect_seconds: float) -> None:
        self._host, self._port, self._is_tls = url.raw_host or "", url.port or 0, url.scheme == "https"
        lines = {"Host": url.host_port_subcomponent, "Accept": "application/json", "Accept-Encoding": "identity", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._connect_seconds = connect_seconds
        self._idle: list[_Connection] = []

    async def ask(self, method: str, target: str, body: bytes | None, *, timeout_seconds: float) -> Reply:
        """Send one request for `target` (path and query), whose body is JSON; never again if it breaks.

        Raises:
            NoConnection: there was no connection, it broke, or what came is no reply.
            TimeoutError: the whole reply was not here in time.
        """
        head = f"{method} {target} HTTP/1.1\r\n{self._head}"
        if body is None:
            # Asked now and then, so that a kept connection would be a worn one; and a lost probe means a lost worker.
            request = f"{head}Connection: close\r\n\r\n".encode()
        else:
            request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_seconds
        connection = self._kept() if body is not None else None
        if connection is None:
            connection = await self._connect(until)
        reply = await connection.ask(request, until)
        # Who refuses a request may not have read all of it: what comes next could be said to the rest.
        if reply.keeps and body is not None and reply.status < 300:
            connection.idle_since = loop.time()
            self._idle.append(connection)
        else:
            connection.abort()
        return reply

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()
        # So that their sockets are closed when this returns.
        await asyncio.sleep(0)

    def _kept(self) -> _Connection | None:
        """The connection that was used last, if it is still fresh."""
        stale_at = asyncio.get_running_loop().time() - KEEP_ALIVE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since > stale_at:
                return connection
            connection.abort()
        return None

    async def _connect(self, until: float) -> _Connection:
        loop = asyncio.get_running_loop()
        patience = min(until, loop.time() + self._connect_seconds)
        try:
            tls = _trusted_authorities() if self._is_tls else None
            async with asyncio.timeout_at(patience):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=tls, happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS
                )
        except TimeoutError as error:
            # The system's own bound is an errno, and no time-out of the caller's.
            if error.errno is None and patience == until:
                raise
            raise NoConnection(error.strerror or f"no connection within {self._connect_seconds:g} s") from error
        except (OSError, UnicodeError) as error:
            raise NoConnection(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._reader = ReplyReader()
        self._reply: asyncio.Future[Reply] | None = None

    async def ask(self, request: bytes, until: float) -> Reply:
        """Send a request and wait for its reply; the connection is of no more use after any error."""
        loop = asyncio.get_running_loop()
        self._reader = ReplyReader()
        reply: asyncio.Future[Reply] = loop.create_future()
        if not self.is_open:
            raise NoConnection("the connection was closed")
        self._reply = reply
        self._transport.write(request)
        timer = loop.call_at(until, self._fail, TimeoutError())
        try:
            return await reply
        except BaseException:
            self.abort()
            raise
        finally:
            self._reply = None
            timer.cancel()

    @property
    def is_open(self) -> bool:
        """Whether neither side has begun to close it."""
        return not self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    # --- what asyncio calls -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection gives
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            # Nobody asked for that.
            self.abort()
            return
        try:
            reply = self._reader.feed(data)
        except BadReply as error:
            self._fail(NoConnection(f"the reply cannot be read: {error}"))
        else:
            if reply is not None:
                self._reply.set_result(reply)

    def eof_received(self) -> None:
        self._end(None)
        # Or what was not sent yet would be waited for.
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._reply is None or self._reply.done():
            return
        try:
            reply = self._reader.end()
        except BadReply:
            reply = None
        # Who refuses a request early may reset what it did not read of it; any other reply may have been cut off.
        if reply is not None and (error is None or reply.status >= 400):
            self._reply.set_result(reply)
        else:
            began = "in the middle of its reply" if self._reader.received else "without a reply"
            self._fail(NoConnection(f"the server closed the connection {began}" + (f": {error}" if error else "")))

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
