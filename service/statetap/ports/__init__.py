"""The ports: what the runtime needs of the outside world. Each has a folder under `adapters/`; nothing here does any I/O.

Every exception that an adapter raises on purpose is one of the classes here, so that the runtime can tell what happened.
"""

from statetap.ports.answers import AnswerJournal, RecordedAnswer
from statetap.ports.clock import Clock
from statetap.ports.datasets import DatasetRefused, Datasets, OpenDataset
from statetap.ports.dumps import CaptureLost, Dump, DumpEvent, DumpRejected, DumpSeen, DumpSource, DumpSourceError, TapSeen
from statetap.ports.inference import (
    GenerateAnswer,
    GenerateSample,
    InferenceClient,
    InferenceError,
    RequestRefused,
    RequestTimedOut,
    ServerFacts,
    WorkerUnreachable,
)
from statetap.ports.ledger import (
    BadCursor,
    CommitEvent,
    IdempotencyConflict,
    IdempotencyKey,
    LeaseLost,
    Ledger,
    LedgerError,
    NotFound,
    Page,
)
from statetap.ports.store import (
    CaptureInspector,
    CaptureReport,
    SampleColumns,
    Segment,
    ShardWriter,
    Store,
    StoreError,
    StoreFacts,
    StoreFull,
    StoreMismatch,
    StorePlan,
    TokenBlock,
    UnitWrite,
)

__all__ = [
    "AnswerJournal",
    "BadCursor",
    "CaptureInspector",
    "CaptureLost",
    "CaptureReport",
    "Clock",
    "CommitEvent",
    "DatasetRefused",
    "Datasets",
    "Dump",
    "DumpEvent",
    "DumpRejected",
    "DumpSeen",
    "DumpSource",
    "DumpSourceError",
    "GenerateAnswer",
    "GenerateSample",
    "IdempotencyConflict",
    "IdempotencyKey",
    "InferenceClient",
    "InferenceError",
    "LeaseLost",
    "Ledger",
    "LedgerError",
    "NotFound",
    "OpenDataset",
    "Page",
    "RecordedAnswer",
    "RequestRefused",
    "RequestTimedOut",
    "SampleColumns",
    "Segment",
    "ServerFacts",
    "ShardWriter",
    "Store",
    "StoreError",
    "StoreFacts",
    "StoreFull",
    "StoreMismatch",
    "StorePlan",
    "TapSeen",
    "TokenBlock",
    "UnitWrite",
    "WorkerUnreachable",
]
