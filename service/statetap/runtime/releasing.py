"""Gives dumps back that could not be given back at once: whatever stood in the way, a dump that stays costs room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, repeat

from structlog.typing import FilteringBoundLogger

from statetap.ports import Clock, Dump
from statetap.telemetry import events

AGAIN_AFTER_SECONDS = (1.0, 5.0, 30.0)


async def release(dumps: Sequence[Dump], log: FilteringBoundLogger) -> list[Dump]:
    """Release them in one thread: to unlink a gigabyte takes the better part of a tenth of a second. Returns those that stay."""
    stayed = await asyncio.to_thread(_release_all, dumps)
    for dump, error in stayed:
        tell_of(dump, error, log)
    return [dump for dump, _ in stayed]


def tell_of(dump: Dump, error: Exception, log: FilteringBoundLogger) -> None:
    """It could not be given back."""
    log.warning(events.DUMP_REJECTED, dump=dump.facts.dump_id, reason=f"cannot be removed: {error}; tried again later")


async def release_again(dump: Dump, clock: Clock, log: FilteringBoundLogger) -> None:
    """Try until it works."""
    for seconds in chain(AGAIN_AFTER_SECONDS, repeat(AGAIN_AFTER_SECONDS[-1])):
        await clock.sleep(seconds)
        try:
            await asyncio.to_thread(dump.release)
        except Exception as error:  # noqa: BLE001 - it is tried again
            tell_of(dump, error, log)
        else:
            return


def _release_all(dumps: Sequence[Dump]) -> list[tuple[Dump, Exception]]:
    stayed: list[tuple[Dump, Exception]] = []
    for dump in dumps:
        try:
            dump.release()
        except Exception as error:  # noqa: BLE001 - whatever it was, the others are released
            stayed.append((dump, error))
    return stayed
