"""What is kept of an object that was sent, once its bytes are out of memory."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class SentObject:
    """Its key, its size, and the XXH3-64 of its bytes: what it is known again by."""

    key: str
    nbytes: int
    digest: int

    @classmethod
    def of(cls, key: str, data: memoryview) -> SentObject:
        hasher = xxhash.xxh3_64(seed=0)
        # Not in one call: in xxhash 3 that holds the interpreter's lock.
        hasher.update(data)
        return cls(key, len(data), hasher.intdigest())
