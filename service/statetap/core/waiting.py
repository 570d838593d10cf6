"""The samples of a unit that wait for a worker: there may be tens of thousands, and every request asks for the next ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class WaitingSamples:
    """In the order in which they are to be asked for: first what nothing befell, in placement order, then what was lost least.

    At first all of them wait. To find the next ones takes a time that does not grow with their number.
    """

    def __init__(self, samples: Iterable[int]) -> None:
        self._places = {sample: place for place, sample in enumerate(samples)}
        # Not a dict: that would look at all that was taken from its beginning to find what comes first.
        self._fresh = OrderedDict.fromkeys(self._places)
        self._again: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[int]:
        """Not to be gone on with after a change."""
        yield from self._fresh
        yield from sorted(self._again, key=self._again.__getitem__)

    def put(self, sample: int, losses: int) -> None:
        """It waits, and was lost so often."""
        if sample not in self._fresh:
            self._again[sample] = losses, self._places[sample]

    def take(self, sample: int) -> None:
        """It does not wait any more."""
        self._fresh.pop(sample, None)
        self._again.pop(sample, None)
