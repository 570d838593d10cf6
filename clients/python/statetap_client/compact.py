"""Compact stores: the same store with its hidden states compressed, about a third smaller and slower to read.

A compact store is a new one. Its hidden arrays have shards of blosc-compressed chunks; every other array and all attributes are
the source's, byte for byte, and so are the digests, which are taken over what chunks decode to. It is there whole or not at all,
and only if every stored sample of the source is what was recorded.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import zarr
from numpy.typing import NDArray

from statetap_client import layout
from statetap_client.compact_shards import CompactArray, PlacedSample, ShardRun, compact_run, shard_runs
from statetap_client.output import size
from statetap_client.reader import StoreReader
from statetap_client.unpublished_store import UnpublishedStore

MAX_THREADS = 8
EXPECTED_RATIO = 0.7
_STATUS = f"{layout.SAMPLES_GROUP}/status/"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

Progress = Callable[[int, int], None]
"""Called with (uncompressed bytes done, bytes to do)."""


class CannotCompact(Exception):
    """There is no compact store to be had of this one, there, now; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """`source_bytes` and `target_bytes` are those of all the files of both stores."""

    samples: int
    source_bytes: int
    target_bytes: int

    @property
    def ratio(self) -> float:
        """How large the target is, the source being 1."""
        return self.target_bytes / self.source_bytes


class _StoppedError(Exception):
    """Another run of shards failed."""


def compact(
    source: Path, target: Path, *, threads: int | None = None, progress: Progress = lambda done, total: None
) -> CompactReport:
    """Write a compact store of the one at `source` to `target`; each of `threads` (one a core, at most 8) has a shard in memory.

    Samples that are stored when it begins are in it; of others it has the status, and no rows.

    Raises:
        NotAStore: at `source`.
        CorruptSample: a sample of the source is not what was recorded of it. There is no target then.
        CannotCompact: the source is compressed already, or grows; the target exists or is inside of it, or the disk lacks room.
        OSError: reading or writing failed.
    """
    source, target = source.resolve(), target.parent.resolve() / target.name
    StoreReader(source)  # or NotAStore
    _refuse_nesting(source, target)
    documents = _documents(source)
    hidden = _hidden_documents(source, documents)
    try:
        with UnpublishedStore(target) as store:
            _copy(source, store, hidden)
            samples = _stored_samples(store.path, hidden)
            if _documents(source) != documents:
                raise CannotCompact(f"{source} grew meanwhile: start again once its job has been planned")
            arrays = [CompactArray(source, store.path, name, document) for name, document in hidden.items()]
            runs = shard_runs(samples, _rows_per_shard(hidden))
            sizes = [sum(array.chunk_bytes(run) for array in arrays) for run in runs]
            _refuse_without_room(store.path, sum(sizes))
            _compact_all(runs, sizes, arrays, threads or min(MAX_THREADS, len(os.sched_getaffinity(0))), progress)
            store.publish(_without_consolidated(documents[layout.METADATA_NAME]))
    except FileExistsError as e:
        raise CannotCompact(str(e)) from e
    except OSError as e:
        if e.errno in _NO_SPACE:
            raise CannotCompact(f"no space left while writing {target}: free some, or raise the quota, and start again") from e
        raise
    return CompactReport(len(samples), _file_bytes(source), _file_bytes(target))


def _compact_all(runs: list[ShardRun], sizes: list[int], arrays: list[CompactArray], threads: int, progress: Progress) -> None:
    stop = Event()

    def check() -> None:
        if stop.is_set():
            raise _StoppedError

    done, total = 0, sum(sizes)
    with ThreadPoolExecutor(threads, thread_name_prefix="compact") as pool:
        futures = {pool.submit(compact_run, run, arrays, check): nbytes for run, nbytes in zip(runs, sizes, strict=True)}
        try:
            progress(done, total)
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                progress(done, total)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _copy(source: Path, store: UnpublishedStore, hidden: dict[str, Any]) -> None:
    """Everything but the root's metadata and the hidden arrays' shards, whose metadata become those of compressed ones."""
    # The service writes `samples/status` last: read first, a sample that it calls stored has its place and digest.
    for key in sorted(_keys(source), key=lambda key: (not key.startswith(_STATUS), key)):
        array = key.split("/", 1)[0]
        if key == layout.METADATA_NAME or (array in hidden and key.startswith(f"{array}/c/")):
            continue
        if array in hidden and key == layout.metadata_key(array):
            store.write(key, json.dumps(layout.compact_document(hidden[array]), indent=2, sort_keys=True).encode())
        else:
            store.write(key, (source / key).read_bytes())


def _stored_samples(root: Path, hidden: dict[str, Any]) -> list[PlacedSample]:
    columns = {name: _column(root, name) for name in ("status", "row_start", "length", "digest", "id")}
    rows = min(document["shape"][0] for document in hidden.values())
    samples = []
    for index in np.flatnonzero(columns["status"] == layout.Status.STORED).tolist():
        start, length = int(columns["row_start"][index]), int(columns["length"][index])
        sample = PlacedSample(index, str(columns["id"][index]), start, start + length, int(columns["digest"][index]))
        if start < 0 or length < 1 or sample.end > rows:
            raise sample.corrupt(f"its rows [{start}, {sample.end}) are none of the store's {rows}")
        samples.append(sample)
    return samples


def _column(root: Path, name: str) -> NDArray[Any]:
    return cast("NDArray[Any]", zarr.open_array(root / layout.SAMPLES_GROUP / name, mode="r")[:])


def _documents(root: Path) -> dict[str, bytes]:
    """All metadata documents of the store, by key."""
    return {key: (root / key).read_bytes() for key in _keys(root) if Path(key).name == layout.METADATA_NAME}


def _hidden_documents(source: Path, documents: dict[str, bytes]) -> dict[str, Any]:
    keys = {name: layout.metadata_key(name) for name in layout.HIDDEN_ARRAYS}
    hidden = {name: json.loads(documents[key]) for name, key in keys.items() if key in documents}
    if not hidden:
        raise CannotCompact(f"{source} has no hidden states: there is nothing to compress")
    for name, document in hidden.items():
        if not layout.is_uncompressed_sharding(document["codecs"]):
            raise CannotCompact(f"the {name} of {source} are compressed already: copy the store as it is")
    if len({document["chunk_grid"]["configuration"]["chunk_shape"][0] for document in hidden.values()}) != 1:
        raise CannotCompact(f"the hidden arrays of {source} differ in their rows per shard: no Statetap service wrote them")
    return hidden


def _rows_per_shard(hidden: dict[str, Any]) -> int:
    document = next(iter(hidden.values()))
    return int(document["chunk_grid"]["configuration"]["chunk_shape"][0])


def _without_consolidated(root_document: bytes) -> bytes:
    """The root's metadata, less a copy of all the arrays' that somebody may have put there: the hidden arrays' are others now."""
    document = json.loads(root_document)
    if document.pop("consolidated_metadata", None) is None:
        return root_document
    return json.dumps(document, indent=2, sort_keys=True).encode()


def _refuse_nesting(source: Path, target: Path) -> None:
    if source in target.resolve().parents:
        raise CannotCompact(f"{target} is inside of the store {source}: give a name outside of it")
    if not target.parent.is_dir():
        raise CannotCompact(f"{target.parent} is no directory: make it first")


def _refuse_without_room(path: Path, nbytes: int) -> None:
    space = os.statvfs(path)
    free, expected = space.f_bavail * space.f_frsize, int(nbytes * EXPECTED_RATIO)
    if free < expected:
        raise CannotCompact(
            f"{path.parent} has {size(free)} free, and {size(nbytes)} of hidden states need about {size(expected)} "
            "when they are compressed: free some, or write to another disk"
        )


def _keys(root: Path) -> Iterator[str]:
    """Every object of the store; files under a dot-name, and what is below such, are nobody's."""
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield str((Path(folder) / name).relative_to(root))


def _file_bytes(root: Path) -> int:
    return sum((root / key).stat().st_size for key in _keys(root))
