"""Where the bytes go: shard objects are removed once their unit is committed, the samples of some of them read back before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from statetap.adapters.datasets.arrow_file import ArrowDataset
from statetap.core.placement import Geometry, alignment_rows, dataset_order, place
from statetap.core.spec import HiddenArray
from statetap_client import layout
from statetap_client.reader import StoreReader
from statetap_client.shard_files import MissingRows, RowRange
from statetap_client.store_files import hidden_files

from tests.rehearsal.null_sink import kept
from tests.rehearsal.workers import PlacedStates


class Outlet:
    """Empties one store, unit by unit. `wrong` are samples that were not there, or there with other bytes than published.

    `every`: of so many shards two are read back (`null_sink.kept`).
    """

    def __init__(
        self, root: Path, dataset: ArrowDataset, states: PlacedStates, arrays: Sequence[HiddenArray], every: int
    ) -> None:
        lengths: Sequence[int] = dataset.lengths.tolist()
        geometry = _geometry(root, arrays)
        self.placement = place(lengths, dataset_order(len(lengths)), geometry)
        self.wrong: list[str] = []
        self.read_back = 0
        self.bytes_emptied = 0
        self._root = root
        self._dataset = dataset
        self._lengths = lengths
        self._states = states
        self._rows_per_shard = geometry.rows_per_shard
        self._row_shapes = {array.name: array.row_shape for array in arrays}
        self._files = hidden_files(root, self._row_shapes, direct=False)
        self._every = every

    def empty(self, unit: int) -> None:
        """Read back some of a committed unit, then remove its objects."""
        plan = self.placement.units[unit]
        for index, row_start in self.placement.samples_of(plan):
            if self._is_kept(index, row_start):
                self._compare(index, row_start)
        for shard in layout.shards_of(plan.row_start, plan.rows, self._rows_per_shard):
            for name in self._files:
                self._remove(name, shard)

    def left(self) -> tuple[str, ...]:
        """Objects of the hidden arrays that are still there."""
        return tuple(
            str(path.relative_to(self._root))
            for name in self._files
            for path in (self._root / name / "c").rglob("*")
            if path.is_file()
        )

    def wrong_records(self) -> tuple[str, ...]:
        """Samples whose status, rows or digest in the finished store are not what they must be."""
        store = StoreReader(self._root)
        wrong = []
        for index, row_start in zip(self.placement.order, self.placement.row_starts, strict=True):
            if store.statuses[index] != layout.Status.STORED:
                wrong.append(f"sample {index}: status {store.statuses[index]}")
            elif store.row_range(index) != (row_start, row_start + self._lengths[index]):
                wrong.append(f"sample {index}: rows {store.row_range(index)}")
            elif store.recorded_digest(index) != self._states.digest(self._dataset.input_ids(index)):
                wrong.append(f"sample {index}: digest {store.recorded_digest(index):016x}")
        return tuple(wrong)

    def _is_kept(self, index: int, row_start: int) -> bool:
        shards = layout.shards_of(row_start, self._lengths[index], self._rows_per_shard)
        return all(kept(shard, self._every) for shard in shards)

    def _compare(self, index: int, row_start: int) -> None:
        self.read_back += 1
        expected = self._states.expected(self._dataset.input_ids(index))
        for name, files in self._files.items():
            memory = np.empty(self._lengths[index] * files.row_bytes, np.uint8)
            try:
                files.read([RowRange(row_start, self._lengths[index], memory.data)])
            except MissingRows as missing:
                self.wrong.append(f"sample {index}: {name}: {missing}")
                continue
            if not np.array_equal(memory, np.frombuffer(expected[name].data, np.uint8)):
                self.wrong.append(f"sample {index}: {name} has other bytes than were published")

    def _remove(self, name: str, shard: int) -> None:
        path = self._root / layout.shard_key(name, shard, self._row_shapes[name])
        try:
            self.bytes_emptied += path.stat().st_size
        except FileNotFoundError:
            self.wrong.append(f"{name}: shard {shard} is not there although its unit is committed")
            return
        shutil.rmtree(self._root / name / "c" / str(shard))


def _geometry(root: Path, arrays: Sequence[HiddenArray]) -> Geometry:
    """As the store says: the service cuts units that fit the workers' budget."""
    document = json.loads((root / layout.metadata_key("")).read_text(encoding="utf-8"))
    said = document["attributes"][layout.ATTRIBUTES_KEY]
    return Geometry(said["rows_per_shard"], said["rows_per_chunk"], alignment_rows(arrays))
