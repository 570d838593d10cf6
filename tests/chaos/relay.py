"""Republishes what a worker dumps, well or badly: the worker publishes below a private root, the service watches another one.

A dump keeps its tap, its name and its bytes unless a fault says otherwise; both roots lie on one file system, so that a rename
publishes. The relay holds the served tap's lock for as long as the worker's own tap lives.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from statetap.core.capture import RefusalReason
from statetap_sglang import header
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.filesystem import rename_noreplace
from statetap_sglang.format import (
    BEACON_NAME,
    DUMP_PREFIX,
    HIDDEN_TENSORS,
    TOKEN_IDS,
    DumpFormatError,
    DumpMetadata,
    TensorView,
    dump_name,
    dump_number,
    error_name,
    error_number,
)
from statetap_sglang.reader import MappedDump, open_dump
from statetap_sglang.tap import FREE_DIRECTORY, ensure_private_directory, lock_tap, tap_is_alive

R = RefusalReason
Tensors = dict[str, TensorView]
# Numbers that no publisher comes to.
FAR_AHEAD = 10**9

# What a fault in a dump does to its attempt: the reasons that may be given, none where the sample must be captured all the same.
DUMP_FAULTS: Mapping[str, frozenset[RefusalReason]] = {
    "dump left under its dot-name": frozenset({R.MISSING_ROWS}),
    "dump torn": frozenset({R.MISSING_ROWS}),
    "dump late": frozenset(),
    "dump too late": frozenset({R.MISSING_ROWS}),
    "duplicate dump": frozenset(),
    "wrong token ids": frozenset({R.WRONG_TOKENS}),
    "wrong rid": frozenset({R.MISSING_ROWS}),
    "missing rows": frozenset({R.MISSING_ROWS, R.WRONG_TOKENS}),
    "NaN": frozenset({R.BAD_VALUES}),
    "zeros": frozenset({R.BAD_VALUES}),
    "wrong dtype": frozenset({R.WRONG_TENSORS}),
    "lost by publisher": frozenset({R.LOST_BY_PUBLISHER}),
    "foreign files": frozenset(),
    "symbolic links": frozenset(),
}


class Relay:
    """One worker's. Not safe for several threads."""

    def __init__(self, private: Path, served: Path, worker: str) -> None:
        self._private = private / worker
        self._served = served / worker
        self._locks: dict[str, int] = {}
        self.foreign: list[Path] = []
        """What does not belong there and must be left alone."""
        self.unfinished: list[Path] = []
        """Dumps under a dot-name: for as long as the tap lives, its publisher may still be writing them."""

    def mirror(self) -> None:
        """Announce taps that are new, and let go of those whose publisher is dead."""
        if not self._private.is_dir():
            return
        for tap in self._private.iterdir():
            alive = tap_is_alive(tap)
            if alive:
                self._hand_back(tap)
            if alive and tap.name not in self._locks and (tap / BEACON_NAME).exists():
                self._served.mkdir(mode=0o700, exist_ok=True)
                self._locks[tap.name] = lock_tap(self._served / tap.name)
                unpublished = self._served / tap.name / f".{BEACON_NAME}"
                # Every dump, however small, is to be written over.
                beacon = json.loads((tap / BEACON_NAME).read_text()) | {"recycle_from_bytes": 1}
                unpublished.write_text(json.dumps(beacon))
                unpublished.replace(self._served / tap.name / BEACON_NAME)
            elif not alive and tap.name in self._locks:
                os.close(self._locks.pop(tap.name))

    def pass_on(self, awaited: set[str]) -> None:
        """Publish what nobody's fault is about: everything but the dumps of requests that are awaited."""
        self.mirror()
        for path in self._found():
            if error_number(path.name) is not None or self._rid(path) not in awaited:
                self._publish(path)

    def publish(self, rid: str, fault: str | None) -> list[Callable[[], None]]:
        """Publish the dumps of one request; returns what is to be published later, if the fault is that."""
        later: list[Callable[[], None]] = []
        for path in self._found():
            if dump_number(path.name) is not None and self._rid(path) == rid:
                if fault in ("dump late", "dump too late"):
                    aside = path.with_name(f".late-{path.name}")
                    path.rename(aside)
                    later.append(lambda path=path, aside=aside: self._publish(aside, path.name))
                else:
                    self._with_fault(path, fault)
        return later

    def clear(self) -> None:
        """Take away what is foreign or unfinished."""
        for path in (*self.foreign, *self.unfinished):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.foreign.clear()
        self.unfinished.clear()

    def close(self) -> None:
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _hand_back(self, tap: Path) -> None:
        """What the service has handed back is the publisher's, if its directory is there."""
        free = self._served / tap.name / FREE_DIRECTORY
        for path in list(free.iterdir()) if free.is_dir() else ():
            ensure_private_directory(tap / FREE_DIRECTORY)
            with suppress(FileNotFoundError):  # the service may have removed it
                path.rename(tap / FREE_DIRECTORY / path.name)

    def _found(self) -> list[Path]:
        taps = [self._private / name for name in self._locks]
        return [path for tap in taps if tap.is_dir() for path in sorted(tap.iterdir()) if path.name.startswith(DUMP_PREFIX)]

    @staticmethod
    def _rid(path: Path) -> str | None:
        try:
            with open_dump(path) as dump:
                return dump.metadata.rid
        except (DumpFormatError, FileNotFoundError):
            return None

    def _target(self, path: Path, name: str | None = None) -> Path:
        return self._served / path.parent.name / (name or path.name)

    def _publish(self, path: Path, name: str | None = None) -> None:
        if path.exists():
            rename_noreplace(path, self._target(path, name))

    def _with_fault(self, path: Path, fault: str | None) -> None:
        target = self._target(path)
        match fault:
            case "dump left under its dot-name":
                self.unfinished.append(path.rename(target.with_name(f".{path.name}")))
                return
            case "dump torn":
                os.truncate(path, path.stat().st_size // 2)
            case "duplicate dump":
                again = target.with_name(dump_name(FAR_AHEAD + (dump_number(path.name) or 0)))
                shutil.copyfile(path, again.with_name(f".{again.name}"))
                rename_noreplace(again.with_name(f".{again.name}"), again)
            case "lost by publisher":
                record = path.with_name(error_name(dump_number(path.name) or 0))
                record.write_bytes(ErrorRecord(self._rid(path) or "", "no room, says the schedule").encode())
                path.unlink()
                path = record
            case "foreign files":
                self._strew(target)
            case "symbolic links":
                self._link(target)
            case None:
                pass
            case _:
                _rewrite(path, _ALTERATIONS[fault])
        self._publish(path)

    def _strew(self, target: Path) -> None:
        for name in ("core.4711", "req_1.safetensors.bak", "req_01.safetensors"):
            (target.parent / name).write_bytes(b"\x00" * 100)
            self.foreign.append(target.parent / name)
        folder = self._served / "lost+found"
        folder.mkdir(exist_ok=True)
        self.foreign.append(folder)

    def _link(self, target: Path) -> None:
        """Links where dumps and taps are looked for, to a file and a folder that are somebody else's."""
        elsewhere = self._private.parent / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        kept = elsewhere / "req_0.safetensors"
        kept.write_bytes(b"somebody's")
        (target.parent / dump_name(2 * FAR_AHEAD + (dump_number(target.name) or 0))).symlink_to(kept)
        tap = self._served / "link-0"
        if not tap.is_symlink():
            tap.symlink_to(elsewhere)
        self.foreign += [kept, tap]


def _rewrite(path: Path, alter: Callable[[DumpMetadata, Tensors], tuple[DumpMetadata, Tensors]]) -> None:
    """Write a dump anew, altered; what its source computed (its checksums) is not told."""
    with open_dump(path) as dump:
        metadata, tensors = alter(dump.metadata, _own(dump))
    unpublished = path.with_name(f".{path.name}")
    unpublished.write_bytes(b"".join(header.encode(tensors, metadata.to_map(), page_aligned=True)))
    unpublished.replace(path)


def _own(dump: MappedDump) -> Tensors:
    return {
        name: TensorView(tensor.dtype, tensor.shape, memoryview(bytes(tensor.data)))
        for name, tensor in dump.tensors.items()
        if name in (TOKEN_IDS, *HIDDEN_TENSORS)
    }


def _hidden(tensors: Tensors, change: Callable[[TensorView], TensorView]) -> Tensors:
    return {name: tensor if name == TOKEN_IDS else change(tensor) for name, tensor in tensors.items()}


def _valued(value: float) -> Callable[[TensorView], TensorView]:
    def change(tensor: TensorView) -> TensorView:
        values = np.frombuffer(tensor.data, np.float32).copy()
        values[: tensor.shape[-1]] = value
        return TensorView(tensor.dtype, tensor.shape, memoryview(values).cast("B"))

    return change


def _halved(tensor: TensorView) -> TensorView:
    values = np.frombuffer(tensor.data, np.float32).astype(np.float16)
    return TensorView("F16", tensor.shape, memoryview(values).cast("B"))


def _first_rows(rows: int) -> Callable[[TensorView], TensorView]:
    def change(tensor: TensorView) -> TensorView:
        row_bytes = tensor.data.nbytes // tensor.shape[0]
        return TensorView(tensor.dtype, (rows, *tensor.shape[1:]), tensor.data[: rows * row_bytes])

    return change


def _other_tokens(tensors: Tensors) -> Tensors:
    tokens = np.frombuffer(tensors[TOKEN_IDS].data, np.int32) ^ 1
    return {**tensors, TOKEN_IDS: TensorView("I32", tokens.shape, memoryview(tokens).cast("B"))}


def _all_but_one(metadata: DumpMetadata, tensors: Tensors) -> tuple[DumpMetadata, Tensors]:
    rows = max(1, metadata.extend_len - 1)
    return replace(metadata, extend_len=rows), {name: _first_rows(rows)(tensor) for name, tensor in tensors.items()}


_ALTERATIONS: Mapping[str, Callable[[DumpMetadata, Tensors], tuple[DumpMetadata, Tensors]]] = {
    "wrong token ids": lambda metadata, tensors: (metadata, _other_tokens(tensors)),
    "wrong rid": lambda metadata, tensors: (replace(metadata, rid=f"{metadata.rid}9"), tensors),
    "missing rows": _all_but_one,
    "NaN": lambda metadata, tensors: (metadata, _hidden(tensors, _valued(float("nan")))),
    "zeros": lambda metadata, tensors: (metadata, _hidden(tensors, _valued(0.0))),
    "wrong dtype": lambda metadata, tensors: (metadata, _hidden(tensors, _halved)),
}
