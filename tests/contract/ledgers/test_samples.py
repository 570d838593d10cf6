"""Samples, read."""

from __future__ import annotations

import pytest
from statetap.core.records import SampleStatus
from statetap.ports import BadCursor

from tests.contract.ledgers.plan import SAMPLES, pages


async def test_samples_are_paged_in_dataset_order(planned):
    assert await pages(lambda **a: planned.samples("job", status=None, **a)) == (SAMPLES, [2, 2, 1])
    assert await pages(lambda **a: planned.samples("job", status=SampleStatus.PENDING, **a)) == (SAMPLES[:4], [2, 2])


async def test_a_range_of_samples_goes_by_dataset_index(planned):
    assert await planned.sample_range("job", 1, 2) == SAMPLES[1:3]
    assert await planned.sample_range("job", 5, 2) == []


async def test_samples_of_a_unit_come_in_placement_order(planned):
    assert await planned.unit_samples("job", 0) == [SAMPLES[3], SAMPLES[0]]
    assert await planned.unit_samples("job", 7) == []


@pytest.mark.parametrize(
    "cursor", ["", "!!", "ä", "am9iczox", "c2FtcGxlczp4", "c2FtcGxlczox=", "c2FtcGxlczo5OTk5OTk5OTk5OTk5OTk5OTk5OTk5"]
)
async def test_a_cursor_from_elsewhere_is_refused(planned, cursor):
    with pytest.raises(BadCursor, match="first page"):
        await planned.samples("job", status=None, limit=1, cursor=cursor)
