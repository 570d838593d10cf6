"""Samples, read."""

from __future__ import annotations

import pytest
from statetap.core.records import SampleStatus
from statetap.ports import BadCursor

from tests.contract.ledgers.plan import SAMPLES, failed, lease, pages, rows_of, stored


async def test_samples_are_paged_in_dataset_order(planned):
    assert await pages(lambda **a: planned.samples("job", status=None, **a)) == (SAMPLES, [2, 2, 1])
    assert await pages(lambda **a: planned.samples("job", status=SampleStatus.PENDING, **a)) == (SAMPLES[:4], [2, 2])


async def test_columns_of_samples_go_by_dataset_index(planned):
    held = await lease(planned)
    await planned.commit_unit(held, [stored(3), failed(0)], [], bytes_stored=0, at=1.0)
    assert rows_of(await planned.sample_columns("job", 3, 1)) == (3, [("s-3", 0, 13, 1, 5, 2**64 - 1)])
    assert rows_of(await planned.sample_columns("job", 0, 3)) == (
        0,
        [("s-0", 16, 10, 2, -1, 0), ("s-1", 64, 11, 0, -1, 0), ("s-2", 80, 12, 0, -1, 0)],
    )


async def test_columns_end_where_the_samples_do(planned):
    assert rows_of(await planned.sample_columns("job", 4, 9)) == (4, [("s-4", -1, 14, 4, -1, 0)])
    assert rows_of(await planned.sample_columns("job", 5, 2)) == (5, [])


async def test_samples_of_a_unit_come_in_placement_order(planned):
    assert await planned.unit_samples("job", 0) == [SAMPLES[3], SAMPLES[0]]
    assert await planned.unit_samples("job", 7) == []


@pytest.mark.parametrize(
    "cursor", ["", "!!", "ä", "am9iczox", "c2FtcGxlczp4", "c2FtcGxlczox=", "c2FtcGxlczo5OTk5OTk5OTk5OTk5OTk5OTk5OTk5"]
)
async def test_a_cursor_from_elsewhere_is_refused(planned, cursor):
    with pytest.raises(BadCursor, match="first page"):
        await planned.samples("job", status=None, limit=1, cursor=cursor)
