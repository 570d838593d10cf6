"""Strict mode: what becomes of one request's lifecycle, told by the run that it belongs to."""

from __future__ import annotations

import asyncio


class Lifecycle:
    """Each moment resolves once, to whether it came; when the attempt fails, none that is still to come does."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[bool] = loop.create_future()
        """Every dump that is expected has appeared, and so has the answer: the lifecycle is to be closed."""
        self.chosen: asyncio.Future[bool] = loop.create_future()
        """It is closed and nothing was ambiguous: only the values remain to be looked at."""
        self.accepted: asyncio.Future[bool] = loop.create_future()
        """The capture is good."""

    def came(self, moment: asyncio.Future[bool]) -> None:
        if not moment.done():
            moment.set_result(True)

    def settle(self, *, accepted: bool) -> None:
        """The attempt is over, one way or the other."""
        for moment, came in ((self.complete, False), (self.chosen, False), (self.accepted, accepted)):
            if not moment.done():
                moment.set_result(came)
