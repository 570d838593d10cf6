"""An S3 server on this machine: moto's, behind a gate that can fail requests as servers and networks do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any
from urllib.request import Request, urlopen

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "statetap-tests"
SECRET = "not-so-secret-8f3a"

Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


@dataclass
class Fault:
    """The next `times` requests of a method to keys that end in `suffix` get `status` as their answer.

    `after`: only once the request was carried out, so that its answer is what is lost.
    """

    method: str
    suffix: str = ""
    status: str = "503 Service Unavailable"
    after: bool = False
    times: int = 1 << 30
    seen: int = 0


@dataclass
class Gate:
    """Between the clients and the server. `requests` are method, path and If-None-Match of all that came."""

    application: Application
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    before: Callable[[str, str], None] = lambda method, path: None
    _lock: Lock = field(default_factory=Lock)
    _creating: Lock = field(default_factory=Lock)

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.before(method, path)
        with self._lock:
            self.requests.append((method, path, environ.get("HTTP_IF_NONE_MATCH")))
            fault = next((f for f in self.faults if f.method == method and path.endswith(f.suffix) and f.seen < f.times), None)
            if fault is not None:
                fault.seen += 1
        if fault is None:
            return self._carry_out(environ, start_response)
        if fault.after:
            list(self._carry_out(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(fault.status, [("Content-Length", "0")])
        return []

    def _carry_out(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self.application(environ, start_response)
        # S3 looks and writes in one step, moto in two.
        with self._creating:
            return list(self.application(environ, start_response))


@dataclass
class ObjectStore:
    """A bucket of the running server. `environment` is what clients must have in theirs."""

    endpoint: str
    gate: Gate
    bucket: str = BUCKET

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }


@contextmanager
def served_object_store() -> Iterator[ObjectStore]:
    """The server in threads of this process, with an empty bucket, until the context ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    gate = Gate(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, gate, threaded=True)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="s3-server", daemon=True)
    thread.start()
    try:
        made = ObjectStore(f"http://127.0.0.1:{server.server_port}", gate)
        with urlopen(Request(f"{made.endpoint}/{BUCKET}", data=b"", method="PUT", headers={"Content-Type": ""}), timeout=60):
            yield made
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
