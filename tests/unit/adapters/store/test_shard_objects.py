"""What is handed over of an object, window by window, is all of it, whichever way it is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from statetap.adapters.store.memory_file import MemoryFile
from statetap.adapters.store.object_files import WINDOW_BYTES, create
from statetap.adapters.store.shard_assembly import Piece, ShardPlan
from statetap.adapters.store.shard_objects import write_object
from statetap.core.placement import Geometry
from statetap.core.spec import HiddenArray

from tests.fakes.write_ways import WAYS, find_way

ROW_BYTES = 1000
ARRAY = HiddenArray("last_hidden_states", (ROW_BYTES // 2,), "bfloat16")
# More than two windows, in chunks that end nowhere in particular.
GEOMETRY = Geometry(rows_per_shard=20_000, rows_per_chunk=1_000, alignment=1)


@pytest.mark.parametrize("way", [*WAYS, "memory"])
@pytest.mark.parametrize("rows", [(1,), (523, 1), (524, 8_000), (19_999,), (3, 1_040, 17_001)])
def test_an_object_is_all_of_its_rows(tmp_path: Path, way: str, rows: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 256, (sum(rows), ROW_BYTES), np.uint8)
    ends = np.cumsum(rows).tolist()
    pieces = tuple(Piece(end - count, values[end - count : end].reshape(-1).data) for end, count in zip(ends, rows, strict=True))
    plan = ShardPlan("key", ARRAY, GEOMETRY, pieces)
    nbytes = plan.nbytes
    file = MemoryFile(nbytes) if way == "memory" else create(tmp_path / "object", nbytes, find_way(way, tmp_path))
    assert write_object(plan, file, None) == nbytes
    file.close()
    written = file.data if isinstance(file, MemoryFile) else (tmp_path / "object").read_bytes()
    assert len(written) == nbytes
    assert bytes(written[: values.nbytes]) == values.tobytes()
    assert GEOMETRY.rows_per_shard * ROW_BYTES / 2 > WINDOW_BYTES
