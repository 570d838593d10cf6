"""What it takes to follow a job for hours: patience with a service that restarts, and the place in its event log. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from httpx_sse import ServerSentEvent

from statetap_client import calls
from statetap_client.errors import ServiceUnreachable
from statetap_client.schemas import Event

FINAL_EVENTS = frozenset({"job.completed", "job.cancelled", "job.failed"})
RECONNECT_SECONDS = 1.0
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
# The service sends a comment every 15 s when it has nothing else to say: longer silence is a dead connection.
SILENCE_SECONDS = 60.0


class Patience:
    """How long in a row a service may be away: it restarts, and the job goes on."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._away_since: float | None = None

    def renew(self) -> None:
        self._away_since = None

    def spend(self, error: ServiceUnreachable) -> None:
        """Raise `error` once the service has been away for too long."""
        now = self._monotonic()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= self._seconds:
            raise error


class LogPosition:
    """Where a reader of a job's event log stands.

    It follows the log until the last event it saw ended the job. Then the rest of the log is read without waiting: a job may
    have been tried again since, and then there is more to follow.
    """

    def __init__(self, job_id: str, *, after: int, follow: bool, ended: bool) -> None:
        self.path = calls.events_path(job_id)
        self.after = after
        self._follow = follow
        self._ended = ended

    @property
    def following(self) -> bool:
        return self._follow and not self._ended

    @property
    def query(self) -> Mapping[str, bool]:
        return {"follow": self.following}

    @property
    def headers(self) -> dict[str, str]:
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", "Last-Event-ID": str(self.after)}

    def take(self, message: ServerSentEvent) -> Event | None:
        """The event in it. None: the service only says that it is there, with a comment, which httpx-sse hands on as well."""
        if not message.data:
            return None
        event = Event.model_validate_json(message.data)
        self.after = event.id
        self._ended = event.event in FINAL_EVENTS
        return event
