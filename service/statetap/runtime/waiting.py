"""Waiting for whichever comes first, on the injected clock."""

from __future__ import annotations

import asyncio

from statetap.ports import Clock


async def wait_or_sleep(event: asyncio.Event, clock: Clock, seconds: float) -> None:
    """Return when `event` is set or after `seconds`, and clear it."""
    waiting = asyncio.ensure_future(event.wait())
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        sleeping.cancel()
        await asyncio.gather(waiting, sleeping, return_exceptions=True)
    event.clear()
