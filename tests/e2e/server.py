"""A real SGLang server with the plugin, as a process group of its own that is always ended by its id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from statetap_sglang.beacon import Beacon

from tests.e2e.environment import CURRENT, PYTHON, ROOT, TINY, check_environment, server_variables

READY = "The server is fired up and ready to roll!"
# SGLang only logs that a plugin's registration raised.
NOT_REGISTERED = "Failed to execute general plugin"
START_SECONDS = 600.0
CLEANING_SECONDS = 5.0
REQUEST_SECONDS = 120.0
TAIL_LINES = 40
# A float32 server that any CPU can run: no graphs, no kernels, and no spinning while several share two cores.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--mem-fraction-static", "0.5", "--sleep-on-idle"),
)
# Lets SGLang 0.5.23 hand out the layers that a model captures; no draft model is loaded.
AUX_FLAGS = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")


class ServerFailed(AssertionError):
    """A server that ended or did not become ready; the message holds the end of its log."""


@dataclass(slots=True, kw_only=True)
class SglangServer:
    """One server. `plugin` are the plugin's settings without their prefix; empty: the server runs without it.

    `aux_flag`: SGLang's own flag for captured layers is given where there is one; the plugin does without, too.

    `folder` takes the logs, `dumps` is the dump root below which the plugin publishes in a directory named `name`.
    """

    name: str
    folder: Path
    dumps: Path
    model: Path = TINY
    flags: Sequence[str] = ()
    plugin: Mapping[str, str] = field(default_factory=lambda: {"LAYERS": "all", "FINAL": "both"})
    version: str = CURRENT
    aux_flag: bool = True
    cores: str = "0-1"
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=REQUEST_SECONDS))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def tiny(self) -> bool:
        return self.model == TINY

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}-{self.starts}.log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    # --- the process ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, again if it was ended before, and do not wait for it: several may start at once."""
        check_environment()
        self.port = self.port or free_port()
        self.starts += 1
        command = [PYTHON, "-m", "sglang.launch_server", "--model-path", self.model, "--host", "127.0.0.1"]
        command += [
            "--port",
            str(self.port),
            *CPU_FLAGS,
            *(AUX_FLAGS if self.aux_flag and self.version == CURRENT else ()),
            *self.flags,
        ]
        command += ["--skip-tokenizer-init"]
        settings = {"DIR": str(self.dumps), "WORKER": self.name, **self.plugin} if self.plugin else {}
        variables = server_variables(self.version, self.cores) | {f"STATETAP_PLUGIN_{k}": v for k, v in settings.items()}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables | dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> SglangServer:
        """Until SGLang says that it is ready.

        Raises:
            ServerFailed: it ended, did not say so in time, or runs without its plugin.
        """
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while READY not in self.log:
            if self.process.poll() is not None:
                raise ServerFailed(self._story(f"ended with code {self.process.returncode}"))
            if time.monotonic() > deadline:
                raise ServerFailed(self._story(f"was not ready within {START_SECONDS:g} s"))
            time.sleep(0.1)
        if NOT_REGISTERED in self.log:
            raise ServerFailed(f"{self.name}: SGLang could not load the plugin:\n{self.log.partition(NOT_REGISTERED)[2][:3000]}")
        return self

    def kill(self) -> None:
        """`kill -9`; returns when the server and all that it started are gone.

        Its workers die with it, and Python's resource tracker then removes what they shared; whoever stays is killed by the id
        of their group. Asked to end, SGLang takes ten seconds over it.
        """
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        patience = time.monotonic() + CLEANING_SECONDS
        while self.process is not None:
            try:
                os.killpg(self.process.pid, 0 if time.monotonic() < patience else signal.SIGKILL)
                time.sleep(0.05)
            except ProcessLookupError:
                self.process = None

    def check_alive(self) -> None:
        """ServerFailed, with the end of the log, unless it runs."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise ServerFailed(self._story(f"ended with code {self.process.returncode}"))

    def _story(self, what: str) -> str:
        return "\n".join([f"{self.name} {what}; the end of {self.log_file}:", *self.log.splitlines()[-TAIL_LINES:]])

    # --- what one asks it -----------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        rid: str | list[str],
        *,
        max_new_tokens: int = 1,
        extra_key: str | None = None,
    ) -> Any:
        """`/generate` at temperature 0. Several prompts with as many rids make one request with several samples.

        The cache key is the rid, as the service has it: a stranger's prompt may begin with the same token.
        """
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": input_ids, "rid": rid, "extra_key": extra_key or rid, "sampling_params": sampling}
        answer = self.http.post(f"{self.url}/generate", json=body)
        assert answer.status_code == 200, self._story(f"answered {answer.status_code} {answer.text}")
        return answer.json()

    def beacon(self) -> Beacon:
        return Beacon.read(self.tap())

    def tap(self) -> Path:
        """The directory of the tap that was opened last."""
        beacons = sorted((self.dumps / self.name).glob("*/tap.json"), key=lambda file: file.stat().st_mtime_ns)
        assert beacons, self._story("has no tap")
        return beacons[-1].parent


@contextmanager
def running(*servers: SglangServer) -> Iterator[None]:
    """Start the servers together; whatever happens, all are ended."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.kill()
            server.http.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
