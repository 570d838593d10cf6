"""What is fuzzed, and how one input is judged."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.mutation import mutated


@dataclass
class Target:
    """A parser. `read` takes an input and raises `refusal`, its documented error, or nothing; `weight` is its share of inputs."""

    name: str
    seeds: list[bytes]
    read: Callable[[bytes, random.Random], None]
    refusal: type[Exception]
    weight: int
    taken: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    reasons: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Fault:
    """An input that broke a parser: anything raised but its documented error, or too long a time."""

    target: str
    seed: int
    what: str
    data: bytes


def try_one(target: Target, seed: int, limit_seconds: float) -> Fault | None:
    """The input is made from its number alone, so that a fault can be had again."""
    rng = random.Random(f"{target.name} {seed}")
    data = mutated(rng.choice(target.seeds), target.seeds, rng)
    began = time.process_time()
    try:
        target.read(data, rng)
        target.taken += 1
    except target.refusal as refusal:
        target.refused += 1
        # The words of a refusal without what it names: how many kinds of refusal were reached.
        target.reasons.add(hashlib.md5(_words(str(refusal)).encode(), usedforsecurity=False).hexdigest())
    except BaseException as error:
        return Fault(target.name, seed, f"{type(error).__name__}: {error}", data)
    seconds = time.process_time() - began
    target.slowest_seconds = max(target.slowest_seconds, seconds)
    if seconds > limit_seconds:
        return Fault(target.name, seed, f"took {seconds:.1f} s of CPU", data)
    return None


def _words(text: str) -> str:
    return "".join(char for char in text if char.isalpha() and char.isascii())[-60:]
