"""How many samples a request carries: as many, in order, as fill so many tokens, which are tuned until the engine is busy.

Between two requests the engine idles for about as long whatever they hold, so that it idles less with larger ones. How busy it
is, dumps tell: each has the stamps of its pass. Over a window of requests that followed upon each other, the engine's *share* is
that of the time between the first and the last pass in which a pass ran. Below `WANTED_SHARE` the tokens grow by as much as is
missing; growing that brought nothing is taken back. Never beyond what a lost request may cost.

Nothing here knows a clock: all times are the stamps of passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# One window's share differs from the next one's by a hundredth: this is so much above the 0.97 that must be reached.
WANTED_SHARE = 0.98
# What a request may hold at most, whatever it would bring: all of it is done again if the request is lost.
MOST_SECONDS = 4.0
MOST_TOKENS = 1 << 17
MOST_SAMPLES = 512
# Requests that a judgement rests on.
WINDOW_REQUESTS = 8
LEAST_GROWTH, MOST_GROWTH = 2.0, 8.0
# By so much more the engine must run for each moment that it idles, or growing has not helped; twice as large should double it.
HELPS = 1.25
# What is measured differs from window to window: by so much tokens may be off the most that a request may hold.
NEAR = 1.1
# So many windows pass before growing is tried again. One that did not help may have met a noisy window, and costs nothing but a
# try; after a large request was lost, what it cost may be lost again.
REST_WINDOWS = 4
REST_WINDOWS_AFTER_LOSS = 16


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way. `missing` are the rows that no pass has run yet, `follows`: it left when the last one was answered."""

    samples: int
    tokens: int
    missing: int
    follows: bool
    passes: set[tuple[int, int]] = field(default_factory=set)


class BatchTuner:
    """One worker's requests. `tokens` is what the samples of one may hold together; one sample always may, however long.

    `fixed` sets it once and for all; 0 is one sample a request. Otherwise it begins there and is tuned.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.tokens = fixed or 0
        self.share: float | None = None
        self._tunes = fixed is None
        self._requests: list[_Request] = []
        self._of_sample: dict[str, _Request] = {}
        self._follows = False
        self._before: tuple[int, float] | None = None
        self._rests = 0

    def take(self, lengths: Iterable[int]) -> int:
        """How many samples of these lengths the next request takes, from the first on: one at least, if there is one."""
        taken = total = 0
        for length in lengths:
            total += length
            if taken and (total > self.tokens or taken == MOST_SAMPLES):
                break
            taken += 1
        return taken

    # --- what becomes of requests -----------------------------------------------------------------------------------------

    def sent(self, lengths: Mapping[str, int]) -> None:
        """A request goes out: the tokens of its samples, by rid."""
        if not self._tunes:
            return
        if len(self._requests) >= 2 * WINDOW_REQUESTS:
            # Rows of some will never be seen.
            self._begin_window()
        tokens = sum(lengths.values())
        request = _Request(len(lengths), tokens, tokens, self._follows and bool(self._requests))
        self._requests.append(request)
        self._of_sample |= dict.fromkeys(lengths, request)
        self._follows = True

    def paused(self) -> None:
        """What goes out next does not follow upon the last request: nobody asked for anything in between."""
        self._follows = False

    def lost(self, rid: str) -> None:
        """The request with this sample failed, or its dumps found no room: if it held several, half must do for a while."""
        request = self._of_sample.get(rid)
        if request is None:
            return
        self._begin_window()
        self._of_sample.clear()
        if request.samples > 1:
            self._go(min(self.tokens, request.tokens // 2), None, REST_WINDOWS_AFTER_LOSS)

    def ran(self, rid: str, rows: int, start_ns: int, end_ns: int) -> None:
        """A pass ran so many of a sample's rows. Without stamps nothing follows from it."""
        request = self._of_sample.get(rid)
        if request is None or not 0 < start_ns < end_ns:
            return
        request.missing -= rows
        request.passes.add((start_ns, end_ns))
        whole = [request for request in self._requests if request.missing <= 0]
        if len(whole) >= WINDOW_REQUESTS and len(whole) == len(self._requests) - (self._requests[-1].missing > 0):
            self._judge(whole)

    # --- what follows from it -----------------------------------------------------------------------------------------------

    def _judge(self, requests: list[_Request]) -> None:
        self._begin_window()
        busy_ns, span_ns = _busy_and_span(requests)
        if span_ns == 0:
            # No two of them followed upon each other: units of one request each, which larger ones would not change.
            return
        share = self.share = busy_ns / span_ns
        tokens = sum(request.tokens for request in requests) / len(requests)
        seconds = sum(_union(sorted(request.passes)) for request in requests) / len(requests) / 1e9
        longest = MOST_SAMPLES * tokens * len(requests) / sum(request.samples for request in requests)
        most = int(min(MOST_TOKENS, tokens / seconds * MOST_SECONDS, longest))
        rests = max(self._rests - 1, 0)
        if self.tokens > most * NEAR:
            self._go(most, None, rests)
        elif share >= WANTED_SHARE:
            self._go(self.tokens, None, rests)
        elif self._before is not None and _run_to_idle(share) < HELPS * _run_to_idle(self._before[1]):
            self._go(self._before[0], None, REST_WINDOWS)
        elif rests or tokens < self.tokens / 2 or self.tokens * NEAR > most:
            # At rest, or units do not even hold what a request might, or it may hardly hold more.
            self._go(self.tokens, None, rests)
        else:
            self._go(min(int(tokens * _growth(share)), most), (self.tokens, share), 0)

    def _go(self, tokens: int, before: tuple[int, float] | None, rests: int) -> None:
        self.tokens, self._before, self._rests = tokens, before, rests

    def _begin_window(self) -> None:
        """What is under way now was sent under other conditions: all that may still be heard of it is that it was lost."""
        newest = self._requests[-1:]
        self._of_sample = {rid: request for rid, request in self._of_sample.items() if request in newest}
        self._requests, self._follows = [], False


def _growth(share: float) -> float:
    """By how much larger requests would be busy enough, if what they idle stayed the same."""
    return min(max(_run_to_idle(WANTED_SHARE) / _run_to_idle(share), LEAST_GROWTH), MOST_GROWTH)


def _run_to_idle(share: float) -> float:
    return share / (1 - share)


def _busy_and_span(requests: list[_Request]) -> tuple[int, int]:
    """Nanoseconds in which a pass ran, and from the first to the last one, over each row of requests that followed each other."""
    busy = span = 0
    row: list[_Request] = []
    for request in [*requests, None]:
        if request is None or not request.follows:
            if len(row) > 1:
                passes = sorted(set().union(*(each.passes for each in row)))
                busy += _union(passes)
                span += max(end for _, end in passes) - passes[0][0]
            row = []
        if request is not None:
            row.append(request)
    return busy, span


def _union(passes: list[tuple[int, int]]) -> int:
    """How long at least one of these ran; they are sorted by their start, and may overlap."""
    covered, until = 0, passes[0][0]
    for start, end in passes:
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered
