"""What is written and read: dumps in shared memory, as a worker publishes them, and the same samples as others store them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from statetap.core.placement import choose_geometry
from statetap.core.spec import HiddenArray
from statetap.ports import Segment, UnitWrite
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import ROW_CHECKSUMS, TensorView
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.reader import MappedDump, open_dump

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

LAYERS, DTYPE = 3, "bfloat16"


@dataclass(frozen=True, slots=True)
class Material:
    """`samples` samples of `rows` rows of 3 + 1 states each, in dumps at `files`."""

    files: tuple[Path, ...]
    rows: int
    hidden: int

    @property
    def arrays(self) -> tuple[HiddenArray, ...]:
        return (
            HiddenArray("aux_hidden_states", (LAYERS, self.hidden), DTYPE),
            HiddenArray("last_hidden_states", (self.hidden,), DTYPE),
        )

    @property
    def nbytes(self) -> int:
        """Of hidden states, in all samples."""
        return len(self.files) * self.rows * sum(array.row_bytes for array in self.arrays)

    def units(self, location: Path) -> list[tuple[list[MappedDump], UnitWrite]]:
        """The samples' dumps, opened, and the units of a store that they fill, in order."""
        geometry = choose_geometry(self.arrays)
        per_unit = max(geometry.rows_per_shard // self.rows, 1)
        apart = -(-self.rows // geometry.alignment) * geometry.alignment
        rows = -(-apart // geometry.rows_per_shard) * geometry.rows_per_shard
        units = []
        for number, first in enumerate(range(0, len(self.files), per_unit)):
            dumps = [open_dump(file) for file in self.files[first : first + per_unit]]
            segments = [
                Segment(a.name, i * apart, dump.tensors[a.name].data) for a in self.arrays for i, dump in enumerate(dumps)
            ]
            unit = UnitWrite(
                location=str(location.absolute()),
                arrays=self.arrays,
                geometry=geometry,
                row_start=number * rows,
                rows=rows,
                fence=1,
                segments=segments,
            )
            units.append((dumps, unit))
        return units

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Each sample's tensors, mapped from its dump: nothing is copied."""
        return [
            {
                name: torch.frombuffer(view.data, dtype=torch.int32 if name == "token_ids" else torch.bfloat16).view(view.shape)
                for name, view in open_dump(file).tensors.items()
                if name != ROW_CHECKSUMS
            }
            for file in self.files
        ]


def publish(root: Path, samples: int, rows: int, hidden: int) -> Material:
    """Dumps of random rows, as a worker would publish them."""
    beacon = make_beacon(aux_layer_ids=tuple(range(LAYERS)), hidden_size=hidden, final="post_norm", budget_bytes=1 << 40)
    root.mkdir(mode=0o700)
    publisher = DumpPublisher(root, "bench", beacon)
    names = [
        publisher.publish(make_metadata(f"r{number}", rows), _with_checksums(make_tensors(beacon, rows, seed=number)))
        for number in range(samples)
    ]
    publisher.close()
    return Material(tuple(publisher.directory / name for name in names), rows, hidden)


def _with_checksums(tensors: Mapping[str, TensorView]) -> dict[str, TensorView]:
    """The same with one bit of every exponent off, so that no infinity and no NaN is left, and with row checksums."""
    finite = {
        name: TensorView(view.dtype, view.shape, (np.frombuffer(view.data, np.uint16) & 0xBFFF).data.cast("B"))
        if view.dtype == "BF16"
        else view
        for name, view in tensors.items()
        if name != ROW_CHECKSUMS
    }
    sums = row_checksums(finite)
    return finite | {ROW_CHECKSUMS: TensorView("I64", sums.shape, sums.data.cast("B"))}


def fsync_all(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(paths: Sequence[Path]) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
