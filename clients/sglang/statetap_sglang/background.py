"""The one thread that publishes: it takes jobs in order, and whatever goes wrong with one becomes that capture's error record.

The forward path only puts jobs into its queue, which never waits: jobs with states are bounded by the ring and the pinned files,
and losses that come faster than they can be recorded are counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from statetap_sglang.checks import CaptureFailed
from statetap_sglang.format import DumpMetadata, TensorView
from statetap_sglang.pinned_files import Landing
from statetap_sglang.publisher import PublishError
from statetap_sglang.snapshot import Arrival

log = logging.getLogger("statetap")

MAX_WAITING = 8192
# Pinned files are tended after every pass, and so often where there is none.
TEND_SECONDS = 10.0


class Publisher(Protocol):
    """What of `DumpPublisher` the thread uses."""

    def publish(self, metadata: DumpMetadata, tensors: Mapping[str, TensorView], number: int | None = None) -> str: ...

    def publish_error(self, rid: str, reason: str, number: int | None = None) -> None: ...


class InPlace(Protocol):
    """What it uses of `InPlacePublisher`, too."""

    def publish_in_place(self, metadata: DumpMetadata, landing: Landing, number: int) -> str: ...

    def tend(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Dump:
    """One dump to publish. `views` gives its tensors once the pass has arrived; `release` frees what holds them.

    `landing`: they have arrived in the dump's own file.
    """

    number: int
    metadata: DumpMetadata
    views: Callable[[], Mapping[str, TensorView]]
    release: Callable[[], None]
    landing: Landing | None = None


@dataclass(frozen=True, slots=True)
class PublishPass:
    """The dumps of one pass, published once `arrival` has come and `check` has not raised CaptureFailed."""

    arrival: Arrival
    check: Callable[[], None]
    dumps: tuple[Dump, ...]


@dataclass(frozen=True, slots=True)
class RecordLoss:
    """A capture that was lost before it came here. `number` is the dump's that was not to be, None if it had none."""

    rid: str
    reason: str
    number: int | None


class BackgroundPublisher:
    """Runs jobs on a thread of its own until `close`; `in_place` publishes dumps that landed in their files, and is tended."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        max_waiting: int = MAX_WAITING,
        in_place: InPlace | None = None,
        tend_seconds: float = TEND_SECONDS,
    ) -> None:
        self._publisher = publisher
        self._in_place = in_place
        self._pause = None if in_place is None else tend_seconds
        self._jobs: queue.Queue[PublishPass | RecordLoss | None] = queue.Queue(max_waiting)
        self._uncounted = 0
        self._thread = threading.Thread(target=self._run, name="statetap-publisher", daemon=True)
        self._thread.start()

    def publish(self, job: PublishPass) -> None:
        """Publish a pass. Never waits; what does not fit in the queue is lost and counted."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            for dump in job.dumps:
                dump.release()
            self._uncounted += len(job.dumps)

    def lose(self, rid: str, reason: str, number: int | None = None) -> None:
        """Record a lost capture. Never waits."""
        try:
            self._jobs.put_nowait(RecordLoss(rid, reason, number))
        except queue.Full:
            self._uncounted += 1

    def drain(self) -> None:
        """Wait until everything that was put before is done. Not for the forward path."""
        self._jobs.join()

    def close(self) -> None:
        """Finish what was put before, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._pause)
            except queue.Empty:
                self._tend()
                continue
            try:
                if job is None:
                    return
                if isinstance(job, PublishPass):
                    self._publish_pass(job)
                    self._tend()
                else:
                    self._record(job.rid, job.reason, job.number)
                if self._uncounted:
                    lost, self._uncounted = self._uncounted, 0
                    self._record("unknown", f"{lost} captures were lost while the publisher was behind", None)
            except Exception:
                log.exception("a publishing job failed")
            finally:
                del job  # its views keep files mapped
                self._jobs.task_done()

    def _tend(self) -> None:
        if self._in_place is not None:
            try:
                self._in_place.tend()
            except Exception:
                log.exception("tending the dump files failed")

    def _publish_pass(self, job: PublishPass) -> None:
        reason = _reason_against(job)
        for dump in job.dumps:
            try:
                self._publish_dump(dump, reason)
            finally:
                dump.release()

    def _publish_dump(self, dump: Dump, reason: str | None) -> None:
        try:
            if reason is not None:
                raise CaptureFailed(reason)
            if dump.landing is not None and self._in_place is not None:
                self._in_place.publish_in_place(dump.metadata, dump.landing, dump.number)
            else:
                self._publisher.publish(dump.metadata, dump.views(), dump.number)
        except (CaptureFailed, PublishError) as error:
            self._record(dump.metadata.rid, error.reason if isinstance(error, PublishError) else str(error), dump.number)
        except Exception as error:  # noqa: BLE001 (any failure is this capture's, never the server's)
            self._record(dump.metadata.rid, f"publishing failed: {describe(error)}", dump.number)

    def _record(self, rid: str, reason: str, number: int | None) -> None:
        log.warning("capture of request %s is lost: %s", rid, reason)
        self._publisher.publish_error(rid, reason, number)


def _reason_against(job: PublishPass) -> str | None:
    """None if the pass arrived and is sound."""
    try:
        job.arrival.wait()
        job.check()
    except CaptureFailed as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (see above)
        return f"the states did not reach the host: {describe(error)}"
    return None


def describe(error: BaseException) -> str:
    """An unexpected error in one line."""
    return f"{type(error).__name__}: {error}"
