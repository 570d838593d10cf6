"""The taps of one worker: which of them count, and what they say together.

A server with data parallelism publishes through one tap for each rank; all taps of one start of it share a boot. Those of the
newest boot count: the worker can be used once every one of its ranks has announced itself, and all say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from statetap.ports import TapRefused, TapSeen

NO_TAP = (
    "the server is up, but no tap has announced itself in its dump directory: check that it publishes there "
    "(for SGLang: that statetap-sglang is installed in its environment and STATETAP_PLUGIN_DIR is set)"
)

# What all ranks of a boot must say alike, by the name that a beacon has for it. Their budgets may differ.
_SAID_ALIKE: Mapping[str, Callable[[TapSeen], object]] = {
    "dp_size": lambda tap: tap.dp_size,
    "model_path": lambda tap: tap.model.model_path,
    "model_fingerprint": lambda tap: tap.model.model_fingerprint,
    "num_layers": lambda tap: tap.model.num_layers,
    "hidden_size": lambda tap: tap.model.hidden_size,
    "vocab_size": lambda tap: tap.model.vocab_size,
    "dtype": lambda tap: tap.model.dtype,
    "aux_layer_ids": lambda tap: list(tap.capture.aux_layer_ids),
    "final": lambda tap: str(tap.capture.final),
    "chunked_prefill_size": lambda tap: tap.chunked_prefill_size,
    "context_length": lambda tap: tap.context_length,
}


@dataclass(frozen=True, slots=True)
class NotUsable:
    """Why a worker with these taps cannot be used, and what would help."""

    reason: str


class WorkerTaps:
    """Takes in what a dump directory says of its taps, as they come and go."""

    def __init__(self) -> None:
        self._alive: dict[tuple[str, type], TapSeen | TapRefused] = {}
        self._said: TapSeen | NotUsable | None = None

    def saw(self, tap: TapSeen | TapRefused) -> None:
        """What a tap says now stands for what it said before, and nothing does once its process has ended."""
        self._said = None
        self._alive.pop((tap.tap, type(tap)), None)
        if tap.alive:
            self._alive[tap.tap, type(tap)] = tap

    @property
    def boot(self) -> str | None:
        """The newest boot that has a living tap, None if there is none."""
        newest = max(reversed(self._alive.values()), key=lambda tap: tap.announced_ns, default=None)
        return None if newest is None else newest.boot

    def together(self) -> TapSeen | NotUsable:
        """What the newest boot's taps say as one.

        A request may land on any rank, and so may all requests of a unit: of their budgets, the smallest is everybody's.
        """
        if self._said is None:
            self._said = self._as_one()
        return self._said

    def _as_one(self) -> TapSeen | NotUsable:
        boot = self.boot
        if boot is None:
            return NotUsable(NO_TAP)
        taps: list[TapSeen] = []
        for tap in self._alive.values():
            if isinstance(tap, TapRefused) and tap.boot == boot:
                return NotUsable(f"tap {tap.tap} publishes nothing: {tap.reason}")
            if isinstance(tap, TapSeen) and tap.boot == boot:
                taps.append(tap)
        taps.sort(key=lambda tap: tap.dp_rank)
        if (fault := _fault(taps)) is not None:
            return NotUsable(fault)
        name = taps[0].tap if len(taps) == 1 else boot
        return replace(taps[0], tap=name, budget_bytes=min(tap.budget_bytes for tap in taps))


def _fault(taps: Sequence[TapSeen]) -> str | None:
    """Why these taps of one boot, by rank, are not one worker's, None if they are."""
    first = taps[0]
    for tap in taps[1:]:
        for what, of in _SAID_ALIKE.items():
            if of(tap) != of(first):
                differing = f"rank {first.dp_rank} says {of(first)!r}, rank {tap.dp_rank} says {of(tap)!r}"
                return f"the taps of boot {first.boot} differ in {what}: {differing}; start all ranks with one configuration"
    if taps[-1].dp_rank >= first.dp_size:
        return f"tap {taps[-1].tap} is of rank {taps[-1].dp_rank}, but says that there are {first.dp_size}; start the server anew"
    missing = sorted(set(range(first.dp_size)) - {tap.dp_rank for tap in taps})
    if missing:
        return (
            f"of {first.dp_size} data-parallel ranks, no tap has announced itself for {', '.join(map(str, missing))}: all must "
            "publish below this dump directory, on this host; if the server has just started, they are still to come"
        )
    return None
