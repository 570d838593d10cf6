"""The catalogue of log events: every line that the service logs has one of these names, and documents its fields here.

An event's name is public (contract §8). `docs/log-events.md` is made from this module: `python -m statetap.telemetry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EventDoc:
    """What an event means, and the fields that its lines may have besides `event`, `level` and `timestamp`."""

    meaning: str
    fields: tuple[str, ...]


CATALOGUE: Final[dict[str, EventDoc]] = {}


def _event(name: str, fields: str, meaning: str) -> str:
    CATALOGUE[name] = EventDoc(meaning, tuple(fields.split()))
    return name


SERVICE_STARTED: Final = _event("service.started", "version host port data_dir", "The API listens and jobs go on.")
SERVICE_STOPPING: Final = _event(
    "service.stopping", "reason drain_seconds", "No further unit is leased; those in flight may end."
)
SERVICE_STOPPED: Final = _event("service.stopped", "", "Everything is closed; the process ends.")
API_REQUEST_FAILED: Final = _event(
    "api.request_failed",
    "method path status error",
    "A handler failed in a way that is the service's fault; the caller got a 500.",
)
API_CALLER_REFUSED: Final = _event(
    "api.caller_refused",
    "method path status reason",
    "A caller brought no key, a wrong one or one of too narrow a scope, or a browser spoke for another site; `path`: the route.",
)
LIBRARY_LOGGED: Final = _event("library.logged", "message logger", "A library logged a message or Python gave a warning.")

DATASET_SUBMITTED: Final = _event("dataset.submitted", "dataset name samples tokens", "A dataset was taken, checked and kept.")
DATASET_REFUSED: Final = _event("dataset.refused", "name line field reason", "A dataset was not taken; nothing of it is kept.")
DATASET_DELETED: Final = _event("dataset.deleted", "dataset", "A dataset was deleted.")

JOB_SUBMITTED: Final = _event("job.submitted", "job dataset store samples tokens units bytes", "A job was planned and recorded.")
JOB_REFUSED: Final = _event("job.refused", "dataset store field reason", "A job was not taken.")
JOB_STARTED: Final = _event("job.started", "job", "The job's first unit is about to be leased.")
JOB_NOT_READY: Final = _event(
    "job.not_ready", "job reason", "Something went wrong while the job was prepared; it is tried again."
)
JOB_PROGRESS: Final = _event(
    "job.progress",
    "job done total failed tokens_per_second bytes_per_second eta_seconds",
    "At a fixed interval: `done` of `total` samples have ended, `failed` of them without being stored.",
)
JOB_PAUSED: Final = _event("job.paused", "job reason", "The job leases no further unit until it is resumed.")
JOB_RESUMED: Final = _event("job.resumed", "job", "The job goes on.")
JOB_CANCELLED: Final = _event("job.cancelled", "job", "The job ended; what was committed stays in its store.")
JOB_WAITING: Final = _event(
    "job.waiting",
    "job reason",
    "All workers that could work on a running job are quarantined or dead; it goes on by itself once one of them is back.",
)
JOB_COMPLETED: Final = _event(
    "job.completed", "job stored failed skipped seconds", "Every sample has ended in one way or another."
)
JOB_FAILED: Final = _event("job.failed", "job reason", "The job cannot go on.")
JOB_RETRIED: Final = _event(
    "job.retried", "job samples units", "Failed samples are tried again, in new units at the store's end."
)

UNIT_LEASED: Final = _event("unit.leased", "job unit worker fence samples", "A unit's extraction begins.")
UNIT_WRITTEN: Final = _event("unit.written", "job unit objects bytes", "A unit's shard objects are durable in the store.")
UNIT_WRITE_FAILED: Final = _event("unit.write_failed", "job unit reason attempt", "A unit's shard objects could not be written.")
UNIT_COMMITTED: Final = _event(
    "unit.committed",
    "job unit stored failed tokens bytes workers lost",
    "The ledger recorded a unit; its dumps are released. `lost` has the attempts that brought no capture, each with its reason.",
)
UNIT_GIVEN_BACK: Final = _event("unit.given_back", "job unit reason", "A unit was not finished and waits to be leased again.")
UNIT_LEASE_LOST: Final = _event(
    "unit.lease_lost", "job unit reason", "Somebody else holds the unit now; what was done does not count."
)
UNIT_CRASHED: Final = _event(
    "unit.crashed", "job unit worker", "The service failed at a unit by a fault of its own; the unit is given back."
)
DISPATCH_FAILED: Final = _event(
    "dispatch.failed", "", "The service failed to hand out or settle units by a fault of its own; it goes on after a pause."
)

SAMPLE_FAILED: Final = _event("sample.failed", "job unit sample rid worker reason", "A sample is given up; the job goes on.")
SAMPLE_RETRIED: Final = _event(
    "sample.retried", "job unit sample rid worker reason delay_seconds", "A sample is tried again under a new id."
)

CAPTURE_REFUSED: Final = _event(
    "capture.refused", "job unit sample worker rid reason", "A sample's dumps do not make an exact, plausible capture."
)
CAPTURE_ADOPTED: Final = _event(
    "capture.adopted", "job unit sample rid", "A capture was made of dumps that an earlier run of the service left."
)

DUMP_STRAY: Final = _event("dump.stray", "worker dump rid rows reason", "A dump belongs to no sample and was released.")
DUMP_REJECTED: Final = _event("dump.rejected", "worker dump reason", "Something in a dump directory is no dump.")
DUMP_LOST: Final = _event(
    "dump.lost",
    "worker rid reason pause_seconds",
    "The publisher said that it could not publish a capture; its worker rests, so that there is room again.",
)

REQUEST_FAILED: Final = _event("request.failed", "job unit worker rid reason", "A request to a worker brought no answer.")

WORKER_ADDED: Final = _event("worker.added", "worker url", "A worker was registered or its configuration changed.")
WORKER_REMOVED: Final = _event("worker.removed", "worker", "A worker was taken out of the pool.")
WORKER_TAP_SEEN: Final = _event(
    "worker.tap_seen",
    "worker tap model layers final",
    "A tap told what it captures, or was configured to.",
)
WORKER_READY: Final = _event("worker.ready", "worker tap model context_length", "A worker may be sent requests.")
WORKER_UNREACHABLE: Final = _event(
    "worker.unreachable", "worker reason", "A worker does not answer; it is asked again now and then."
)
WORKER_BATCH_TUNED: Final = _event(
    "worker.batch_tuned",
    "worker max_batch_tokens before busy_share",
    "The requests to a worker hold more or fewer tokens from now on; `busy_share`: of the time in which its engine ran a pass.",
)
WORKER_SUSPECT: Final = _event(
    "worker.suspect",
    "worker rid samples reason",
    "A request timed out and may still run; the worker waits for its end. `rid`: of the first of its samples.",
)
WORKER_QUARANTINED: Final = _event(
    "worker.quarantined",
    "worker reason seconds times",
    "A worker's attempts fail for a reason of its own; it is left alone for so long. `times`: so often without a capture.",
)
WORKER_PROBED: Final = _event("worker.probed", "worker rid", "A quarantined worker is tried with one attempt.")
WORKER_BACK: Final = _event("worker.back", "worker reason", "A worker that was quarantined or dead is used again.")
WORKER_DEAD: Final = _event(
    "worker.dead",
    "worker reason",
    "A worker was quarantined too often in a row; it is used again once it was started anew, or removed and added.",
)
WORKER_REFUSED: Final = _event(
    "worker.refused", "worker reason", "What a worker captures does not fit its configuration or the pool."
)
WORKER_DRAINING: Final = _event("worker.draining", "worker", "A worker gets no further request; what is in flight ends.")

STORE_CREATED: Final = _event("store.created", "job store", "A store was made.")
STORE_GROWN: Final = _event("store.grown", "job store", "A store got room for more rows.")
PROJECTION_FAILED: Final = _event(
    "projection.failed", "job reason", "The store's `samples/*` could not be written; it is tried again."
)
PROJECTION_WRITTEN: Final = _event("projection.written", "job", "The store's `samples/*` follow the ledger again.")
