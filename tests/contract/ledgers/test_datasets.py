"""Datasets."""

from __future__ import annotations

import pytest
from statetap.core.records import JobState
from statetap.ports import LedgerError, NotFound

from tests.contract.ledgers.plan import dataset, pages


async def test_a_dataset_comes_back_as_it_was_and_is_gone_when_deleted(ledger):
    assert await ledger.dataset("data") == dataset()
    await ledger.delete_dataset("data")
    for missing in (ledger.dataset, ledger.delete_dataset):
        with pytest.raises(NotFound, match="'data'"):
            await missing("data")


async def test_a_dataset_id_is_taken_once(ledger):
    with pytest.raises(LedgerError, match="already"):
        await ledger.add_dataset(dataset())


async def test_datasets_are_listed_newest_first_and_a_cursor_survives_deletions(ledger):
    for name in "bcde":
        await ledger.add_dataset(dataset(name))
    items, sizes = await pages(ledger.datasets)
    assert [d.id for d in items] == ["e", "d", "c", "b", "data"]
    assert sizes == [2, 2, 1]
    first = await ledger.datasets(limit=2, cursor=None)
    await ledger.delete_dataset("d")
    await ledger.add_dataset(dataset("f"))
    assert [d.id for d in (await ledger.datasets(limit=2, cursor=first.cursor)).items] == ["c", "b"]


async def test_a_dataset_that_an_unfinished_job_needs_stays(planned):
    with pytest.raises(LedgerError, match="needed"):
        await planned.delete_dataset("data")
    assert await planned.dataset("data") == dataset()
    await planned.set_job_state("job", JobState.CANCELLED, None, at=1.0)
    await planned.delete_dataset("data")
