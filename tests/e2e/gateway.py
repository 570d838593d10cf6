"""A gateway before a server that forgets the cache key of the first requests: so an old router, or one key too few."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.e2e.server import REQUEST_SECONDS, SglangServer


class Gateway(ThreadingHTTPServer):
    """Hands everything on to the server; `/generate` without its `extra_key` so many times."""

    daemon_threads = True

    def __init__(self, server: SglangServer, forgets: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server, self.left = server, forgets
        self.http = httpx.Client(timeout=REQUEST_SECONDS)
        self.mutex = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def body(self, path: str, content: bytes) -> bytes:
        with self.mutex:
            if path != "/generate" or not self.left:
                return content
            self.left -= 1
        asked = json.loads(content)
        del asked["extra_key"]
        return json.dumps(asked).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.http.request(
            self.command,
            self.server.server.url + self.path,
            content=self.server.body(self.path, content),
            headers={"Content-Type": "application/json"},
        )
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_POST = do_GET  # noqa: N815 (http.server's names)

    def log_message(self, *args: object) -> None:
        """Nothing: what matters is in the server's log."""


@contextmanager
def forgetful_gateway(server: SglangServer, *, forgets: int) -> Iterator[Gateway]:
    with Gateway(server, forgets) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield gateway
        finally:
            gateway.shutdown()
            thread.join()
            gateway.http.close()
