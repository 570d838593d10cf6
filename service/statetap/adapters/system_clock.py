"""The clock of the machine."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements the port `Clock`."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
