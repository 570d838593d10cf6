"""What every ledger must do: the SQL one and the fake pass the same suite."""

from __future__ import annotations

import pytest
from statetap.adapters.ledger import SqlLedger
from statetap.ports import Ledger

from tests.contract.ledgers.plan import SAMPLES, UNITS, dataset, job
from tests.fakes.ledger import FakeLedger


@pytest.fixture(params=["fake", "sql"])
async def ledger(request, tmp_path):
    made: Ledger = FakeLedger() if request.param == "fake" else SqlLedger(f"sqlite:///{tmp_path}/ledger.db")
    await made.open()
    await made.add_dataset(dataset())
    yield made
    await made.close()


@pytest.fixture
async def planned(ledger):
    """A ledger that has the job."""
    await ledger.add_job(job(), UNITS, SAMPLES)
    return ledger
