"""What becomes of connections: which are used again, and what is told where one fails."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trustme
from statetap.adapters.inference import connections as module
from statetap.adapters.inference.connections import Connections, NoConnection
from yarl import URL

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Answering = Callable[[asyncio.StreamWriter], None]


class Server:
    """Does with each request what it is told to; `requests` are (number of the connection, head and body)."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, bytes]] = []
        self.answer: Answering = lambda writer: writer.write(OK)
        self.connections = 0
        self.ended = asyncio.Event()
        """One of them was closed by the client."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")), 0)
                self.requests.append((number, head + await reader.readexactly(length)))
                self.answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
            writer.close()


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def connections(server: Server) -> AsyncIterator[Connections]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    made = Connections(URL(f"http://127.0.0.1:{port}"), {"X-Key": "k"}, connect_seconds=10)
    yield made
    await made.close()
    listening.close()


async def post(connections: Connections, body: bytes = b"{}", timeout_seconds: float = 30) -> bytes:
    return (await connections.ask("POST", "/path?q=1", body, timeout_seconds=timeout_seconds)).content


async def test_a_request_is_sent_as_it_is_asked(server: Server, connections: Connections) -> None:
    assert await post(connections, b'{"a":1}') == b"{}"
    ((_, request),) = server.requests
    head, body = request.split(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert (first, body) == ("POST /path?q=1 HTTP/1.1", b'{"a":1}')
    sent = dict(header.split(": ", 1) for header in headers)
    assert sent.pop("Host").startswith("127.0.0.1:")
    assert sent == {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "X-Key": "k",
        "Content-Type": "application/json",
        "Content-Length": "7",
    }


async def test_a_connection_is_used_again(server: Server, connections: Connections) -> None:
    for _ in range(3):
        await post(connections)
    assert [number for number, _ in server.requests] == [1, 1, 1]


async def test_requests_at_the_same_time_have_connections_of_their_own(server: Server, connections: Connections) -> None:
    await asyncio.gather(post(connections), post(connections))
    assert sorted(number for number, _ in server.requests) == [1, 2]


async def test_a_probe_has_a_connection_of_its_own(server: Server, connections: Connections) -> None:
    await post(connections)
    await connections.ask("GET", "/ping", None, timeout_seconds=30)
    await post(connections)
    assert [number for number, _ in server.requests] == [1, 2, 1]
    assert b"\r\nConnection: close\r\n" in server.requests[1][1]


async def test_a_connection_that_idled_too_long_is_not_used_again(
    server: Server, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(connections)
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.0)
    await post(connections)
    assert [number for number, _ in server.requests] == [1, 2]


async def test_a_connection_that_the_server_closed_is_not_used_again(server: Server, connections: Connections) -> None:
    def answer_and_close(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        writer.close()

    server.answer = answer_and_close
    await post(connections)
    async with asyncio.timeout(30):
        while connections._idle[0].is_open:
            await asyncio.sleep(0)
    await post(connections)
    assert [number for number, _ in server.requests] == [1, 2]


async def test_what_comes_unasked_ends_a_connection(server: Server, connections: Connections) -> None:
    writers: list[asyncio.StreamWriter] = []
    server.answer = lambda writer: (writers.append(writer), writer.write(OK))[0]
    await post(connections)
    writers[0].write(OK)
    async with asyncio.timeout(30):
        while connections._idle[0].is_open:
            await asyncio.sleep(0)
    await post(connections)
    assert [number for number, _ in server.requests] == [1, 2]


@pytest.mark.parametrize("status", [302, 400, 503])
async def test_a_connection_on_which_a_request_was_refused_is_not_used_again(
    server: Server, connections: Connections, status: int
) -> None:
    """The server may not have read all of it, and what it says next would be said to the rest."""
    server.answer = lambda writer: writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\n{}" % status)
    await post(connections)
    await post(connections)
    assert [number for number, _ in server.requests] == [1, 2]
    async with asyncio.timeout(30):
        await server.ended.wait()


@pytest.mark.parametrize(("status", "is_a_reply"), [(200, False), (413, True)])
async def test_a_reset_cuts_off_all_but_refusals(server: Server, connections: Connections, status: int, is_a_reply: bool) -> None:
    def say_and_reset(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d Some\r\n\r\nthing" % status)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asyncio.get_running_loop().call_later(0.05, writer.transport.abort)

    server.answer = say_and_reset
    if is_a_reply:
        assert await post(connections) == b"thing"
    else:
        with pytest.raises(NoConnection, match="in the middle of its reply"):
            await post(connections)


async def test_a_server_that_says_no_more_is_not_waited_for(server: Server, connections: Connections) -> None:
    """Not even where it takes no more of the request, either."""
    server.answer = lambda writer: writer.write_eof()
    with pytest.raises(NoConnection, match="without a reply"):
        await post(connections)


async def test_the_systems_own_bound_is_no_time_out_of_the_callers(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    with pytest.raises(NoConnection, match="Connection timed out"):
        await post(connections, timeout_seconds=5)


async def test_an_authority_that_cannot_be_read_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> ssl.SSLContext:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(module, "_trusted_authorities", unreadable)
    with pytest.raises(NoConnection, match="No such file"):
        await post(Connections(URL("https://127.0.0.1:1"), {}, connect_seconds=10))


async def test_a_time_out_ends_the_connection(server: Server, connections: Connections) -> None:
    server.answer = lambda writer: None
    with pytest.raises(TimeoutError):
        await post(connections, timeout_seconds=0.05)
    async with asyncio.timeout(10):
        await server.ended.wait()
    server.answer = lambda writer: writer.write(OK)
    await post(connections)
    assert [number for number, _ in server.requests] == [1, 2]


async def test_a_request_that_is_given_up_ends_its_connection(server: Server, connections: Connections) -> None:
    arrived = asyncio.Event()
    server.answer = lambda writer: arrived.set()
    asking = asyncio.create_task(post(connections))
    await arrived.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(10):
        await server.ended.wait()
    server.answer = lambda writer: writer.write(OK)
    assert await post(connections) == b"{}"
    assert [number for number, _ in server.requests] == [1, 2]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "closed the connection without a reply"),
        (OK[:-1], "closed the connection in the middle of its reply"),
        (b"220 mail.example.org ESMTP\r\n\r\n", "cannot be read: it begins with"),
    ],
)
async def test_what_is_no_reply_is_no_connection(server: Server, connections: Connections, raw: bytes, reason: str) -> None:
    def say_and_close(writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        writer.close()

    server.answer = say_and_close
    with pytest.raises(NoConnection, match=reason):
        await post(connections)


async def test_a_reply_may_end_with_its_connection(server: Server, connections: Connections) -> None:
    def say_and_close(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    server.answer = say_and_close
    assert await post(connections) == b"all of it"


async def test_where_nobody_listens_there_is_no_connection() -> None:
    listening = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    with pytest.raises(NoConnection, match=f"cannot connect to 127.0.0.1:{port}"):
        await post(Connections(URL(f"http://127.0.0.1:{port}"), {}, connect_seconds=10))


async def test_a_server_is_asked_by_tls_if_its_certificate_can_be_trusted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    authority, offered = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(offered)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=offered)
    url = URL(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    strangers = Connections(url, {}, connect_seconds=10)
    with pytest.raises(NoConnection, match="certificate verify failed"):
        await post(strangers)
    # Where OpenSSL looks for the authorities that it trusts.
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    module._trusted_authorities.cache_clear()
    request.addfinalizer(module._trusted_authorities.cache_clear)
    trusting = Connections(url, {}, connect_seconds=10)
    served = server.connections
    for _ in range(2):
        assert await post(trusting) == b"{}"
    assert server.connections == served + 1
    await trusting.close()
    listening.close()
