"""What can go wrong between a client and its service. Each message is a sentence for people; the class carries the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statetap_client.schemas import Problem


class ClientFailure(Exception):
    """A call that brought no result."""


class StatetapError(ClientFailure):
    """The service answered with a problem: it refused, or failed. `problem` says where: status, field, line of a dataset."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or f"{problem.title} (HTTP {problem.status})")
        self.problem = problem

    @property
    def status(self) -> int:
        return self.problem.status


class ServiceUnreachable(ClientFailure):
    """No answer at all: nothing listens there, or the connection broke."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no answer from a Statetap service at {url} ({reason}); "
            "start one with `statetap serve`, or name another with --url or STATETAP_URL"
        )
        self.url = url
        self.reason = reason


class NoUsableKey(ClientFailure):
    """The API key cannot be read, or cannot be one. The message does not hold it."""
