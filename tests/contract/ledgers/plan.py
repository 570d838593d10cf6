"""One small job, planned, and what the ledger's tests do with it."""

from __future__ import annotations

from dataclasses import replace

from statetap.core.placement import Geometry
from statetap.core.records import (
    DatasetRecord,
    JobCounts,
    JobRecord,
    JobSpec,
    JobState,
    SampleRecord,
    SampleStatus,
    SampleVerdict,
    UnitRecord,
)
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts

SPEC = JobSpec(
    dataset="data",
    store="/stores/a",
    capture=CaptureSpec((1, 3), Final.BOTH),
    model=ModelFacts("org/model", "fingerprint", 8, 64, 1000, "bfloat16"),
    identity=Identity.TOKENS,
    geometry=Geometry(64, 32, 16),
    order="permutation",
    seed=7,
    on_over_long="skip",
    first_row=0,
    first_sample=0,
)


def dataset(name="data"):
    return DatasetRecord(
        id=name,
        name=f"the {name}",
        model="org/model",
        samples=5,
        tokens=50,
        max_tokens=14,
        sha256="ab" * 32,
        tokenizer="org/model",
        chat_template_sha256="cd" * 32,
        created_at=1000.5,
    )


def job(name="job", **changes):
    record = JobRecord(
        id=name, name="a job", priority=3, state=JobState.PLANNING, reason=None, spec=SPEC, counts=JobCounts(), created_at=2000.25
    )
    return replace(record, **changes)


def sample(index, unit, row_start=0, **changes):
    record = SampleRecord(
        job="job",
        sample=index,
        id=f"s-{index}",
        unit=unit,
        row_start=row_start,
        length=10 + index,
        status=SampleStatus.PENDING,
    )
    return replace(record, **changes)


def unit(index, members):
    return UnitRecord(job="job", index=index, row_start=64 * index, rows=64, samples=tuple(members))


# Five samples: 3 and 0 in unit 0 (in that order), 1 and 2 in unit 1, and 4 too long for any.
UNITS = [unit(0, (3, 0)), unit(1, (1, 2))]
SAMPLES = [
    sample(0, 0, 16),
    sample(1, 1, 64),
    sample(2, 1, 80),
    sample(3, 0, 0),
    sample(4, None, -1, status=SampleStatus.SKIPPED, reason="too long"),
]
AT_START = JobCounts(pending=4, skipped=1, tokens_total=10 + 11 + 12 + 13, units_total=2)


def stored(index, **changes):
    return replace(
        SampleVerdict(
            sample=index, status=SampleStatus.STORED, reason=None, attempts=1, worker="w", next_token=5, digest=2**64 - 1
        ),
        **changes,
    )


def failed(index, reason="not finite"):
    return SampleVerdict(sample=index, status=SampleStatus.FAILED, reason=reason, attempts=3, worker="w")


async def lease(ledger, owner="me", now=0.0):
    got = await ledger.lease_unit("job", owner, now=now, ttl_seconds=60)
    assert got is not None
    return got


async def samples_of(ledger):
    """All of the job's, in dataset order."""
    return (await ledger.samples("job", status=None, limit=10, cursor=None)).items


def rows_of(columns):
    """The first of the samples, and a row for each, all in Python's own types."""
    numbers = (columns.row_start, columns.length, columns.status, columns.next_token, columns.digest)
    assert [values.dtype for values in numbers] == ["int64", "int32", "uint8", "int32", "uint64"]
    return columns.first, list(zip(columns.ids, *(values.tolist() for values in numbers), strict=True))


async def pages(listing, **arguments):
    """Every item of a paged list, and how many came on each page."""
    items, sizes, cursor = [], [], None
    while True:
        page = await listing(limit=2, cursor=cursor, **arguments)
        items += page.items
        sizes.append(len(page.items))
        cursor = page.cursor
        if cursor is None:
            return items, sizes
