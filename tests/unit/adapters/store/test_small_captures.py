from __future__ import annotations

import asyncio

import numpy as np
import pytest
from statetap.adapters.store import small_captures
from statetap.adapters.store.small_captures import CaptureInspectorBySize
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart

ARRAY = HiddenArray("last_hidden_states", (8,), "float32")


@pytest.fixture
def inspector():
    inspector = CaptureInspectorBySize(ThreadedCaptureInspector(parallel=1))
    yield inspector
    inspector.close()


def capture_of(rows: int) -> list[CapturePart]:
    values = np.arange(1, rows * 8 + 1, dtype=np.float32)
    halves = (values[: rows // 2 * 8], values[rows // 2 * 8 :])
    return [CapturePart({ARRAY.name: half.data.cast("B")}) for half in halves]


@pytest.mark.parametrize(("rows", "at_once"), [(4, True), (5, False)])
async def test_only_a_large_capture_makes_the_loop_wait_for_a_thread(inspector, monkeypatch, rows, at_once) -> None:
    monkeypatch.setattr(small_captures, "SMALL_BYTES", 4 * ARRAY.row_bytes)
    looked = asyncio.ensure_future(inspector.inspect(capture_of(rows), [ARRAY]))
    await asyncio.sleep(0)
    assert looked.done() == at_once
    assert (await looked).norms[0].rows == (0, rows - 1)


async def test_a_capture_comes_to_the_same_wherever_it_is_looked_at(inspector, monkeypatch) -> None:
    at_once = await inspector.inspect(capture_of(4), [ARRAY])
    monkeypatch.setattr(small_captures, "SMALL_BYTES", 0)
    assert await inspector.inspect(capture_of(4), [ARRAY]) == at_once
