"""The names of requests: new for every attempt, so that a late dump of an abandoned attempt is a stray by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"st-(?P<job>[a-z0-9]+)-(?P<unit>[0-9]+)-(?P<sample>[0-9]+)-(?P<attempt>[0-9]+)-(?P<fence>[0-9]+)")


@dataclass(frozen=True, slots=True)
class RequestName:
    """What a rid says: the attempt-th try of a sample (dataset index) of a unit, under the lease with that fence."""

    job: str
    unit: int
    sample: int
    attempt: int
    fence: int

    @property
    def rid(self) -> str:
        return f"st-{self.job}-{self.unit}-{self.sample}-{self.attempt}-{self.fence}"

    @classmethod
    def parse(cls, rid: str) -> RequestName | None:
        """The name behind a rid, None if it is not one of ours."""
        found = _PATTERN.fullmatch(rid)
        if found is None:
            return None
        return cls(found["job"], *(int(found[part]) for part in ("unit", "sample", "attempt", "fence")))
