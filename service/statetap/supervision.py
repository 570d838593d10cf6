"""What a supervisor is told: that the service is ready, that it stops, and that its event loop still turns.

systemd's protocol (sd_notify(3), "new-style daemons"): a datagram to the socket that NOTIFY_SOCKET names. Without one nothing
happens. Kubernetes asks instead: `/healthz` and `/readyz`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


class Supervisor:
    """Who started the service, as `environment` says."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # Linux's abstract namespace
            self._address = "\0" + self._address[1:]
        meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environment.get("WATCHDOG_USEC", "")
        self._watchdog_seconds = int(microseconds) / 1e6 if meant and microseconds.isdecimal() else 0.0

    def tell(self, state: str) -> None:
        """Best effort: a supervisor that does not listen changes nothing."""
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.sendto(state.encode(), self._address)

    async def watch(self) -> None:
        """Say in time, again and again, that the event loop turns; return at once where nobody waits for it."""
        while self._address and self._watchdog_seconds:
            self.tell(ALIVE)
            await asyncio.sleep(self._watchdog_seconds / 3)
