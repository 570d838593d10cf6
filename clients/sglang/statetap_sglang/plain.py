"""Plain dumps: `req_<N>/` directories as hand-patched servers write them, matched by token count alone.

They carry no identity and no beacon: which tensors they hold, under which names, is declared by whoever runs the server.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from statetap_sglang import header, torch_files
from statetap_sglang.filesystem import rename_noreplace, round_to_pages, write_all
from statetap_sglang.format import (
    AUX_HIDDEN_STATES,
    DUMP_PREFIX,
    DUMP_SUFFIX,
    HIDDEN_TENSORS,
    LAST_HIDDEN_STATES,
    LAST_HIDDEN_STATES_PRENORM,
    MODEL_DTYPES,
    DumpFormatError,
    TensorView,
)
from statetap_sglang.reader import MappedFile
from statetap_sglang.tap import ensure_private_directory

MARKERS = ("DONE", "meta.json")
MAX_FILES = 1024

_NAME = re.compile(re.escape(DUMP_PREFIX) + r"([0-9]{1,18})", re.ASCII)
_STEM = re.compile(r"[^./\0][^/\0]*")


def plain_number(name: str) -> int | None:
    """N of `req_<N>`, which servers may pad with zeros; None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLayout:
    """How one server writes its plain dumps.

    `tensors` maps Statetap's tensor names to the server's: the tensor's name inside a single `.safetensors` file, or the
    stem of a `.pt` file that holds that one tensor. `published_by` is `rename` (the directory appears whole) or the name
    of a file that is written last, `DONE` or `meta.json`. `kind` is `safetensors` or `pt`. Aux states may be `[T, K, H]`
    or `[T, K*H]`, with K = `aux_layers`.

    Raises:
        ValueError: a layout that describes no dump.
    """

    kind: str = "safetensors"
    published_by: str = "rename"
    tensors: Mapping[str, str]
    aux_layers: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("safetensors", "pt"):
            raise ValueError(f"kind is {self.kind!r}, it must be safetensors or pt")
        if self.published_by not in ("rename", *MARKERS):
            raise ValueError(f"published_by is {self.published_by!r}, it must be rename, {' or '.join(MARKERS)}")
        if not self.tensors or not self.tensors.keys() <= set(HIDDEN_TENSORS):
            raise ValueError(f"tensors names {sorted(self.tensors)}, it must name one or more of {', '.join(HIDDEN_TENSORS)}")
        if len(set(self.tensors.values())) < len(self.tensors):
            raise ValueError(f"tensors gives two tensors one name: {dict(self.tensors)}")
        if self.kind == "pt" and not all(_STEM.fullmatch(stem) for stem in self.tensors.values()):
            raise ValueError(f"tensors gives names that cannot be names of files: {dict(self.tensors)}")
        if (AUX_HIDDEN_STATES in self.tensors) != (self.aux_layers > 0):
            raise ValueError(f"aux_layers is {self.aux_layers}, it must be above 0 exactly where {AUX_HIDDEN_STATES} is named")

    @classmethod
    def default(cls, *, aux_layers: int, final: str, kind: str = "safetensors", published_by: str = "rename") -> PlainLayout:
        """The layout that uses Statetap's own names for the tensors of a capture spec."""
        names = [AUX_HIDDEN_STATES] if aux_layers else []
        names += [LAST_HIDDEN_STATES] if final in ("post_norm", "both") else []
        names += [LAST_HIDDEN_STATES_PRENORM] if final in ("pre_norm", "both") else []
        return cls(kind=kind, published_by=published_by, tensors={n: n for n in names}, aux_layers=aux_layers)


class PlainDump:
    """An open plain dump: views as in `MappedDump` (keys are Statetap's names), `rows` of each, and no metadata.

    Views are aligned to their elements, not to pages. `nbytes` is what the directory's files hold on tmpfs: whole pages.
    """

    path: Path
    rows: int
    tensors: Mapping[str, TensorView]
    nbytes: int

    def __init__(self, path: Path, tensors: Mapping[str, TensorView], nbytes: int) -> None:
        self.path = path
        self.tensors = tensors
        self.rows = next(iter(tensors.values())).rows
        self.nbytes = nbytes

    def close(self) -> None:
        """Drop the mappings; views still held by somebody keep theirs alive."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_plain_dump(directory: Path, layout: PlainLayout) -> PlainDump:
    """Map one complete plain dump. `.pt` files are read with `torch.load(weights_only=True, mmap=True)` only.

    Raises:
        FileNotFoundError: it is gone.
        DumpFormatError: it does not hold what the layout declares.
        OSError: the system refused (descriptors, memory); the dump may be sound.
    """
    sizes = _file_sizes(directory)
    try:
        found = _read_safetensors(directory, layout, sizes) if layout.kind == "safetensors" else _read_pt(directory, layout)
    except FileNotFoundError as error:
        if not directory.exists():
            raise
        raise DumpFormatError(directory, f"lacks {Path(error.filename).name}") from error
    tensors = {name: _hidden(directory, name, tensor, layout) for name, tensor in found.items()}
    if len({(tensor.rows, tensor.dtype, tensor.shape[-1]) for tensor in tensors.values()}) > 1:
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        raise DumpFormatError(directory, f"tensors that do not fit each other: {shapes}")
    return PlainDump(directory, tensors, sum(round_to_pages(size) for size in sizes.values()))


def is_complete(directory: Path, layout: PlainLayout) -> bool:
    """Whether the file written last is there; a directory published by rename is complete when it is visible."""
    renamed = layout.published_by == "rename"
    try:
        mode = (directory if renamed else directory / layout.published_by).lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(mode) if renamed else stat.S_ISREG(mode)


def _file_sizes(directory: Path) -> dict[str, int]:
    if directory.is_symlink():
        raise DumpFormatError(directory, "a symbolic link; those are never followed")
    try:
        entries = list(os.scandir(directory))
    except NotADirectoryError as error:
        raise DumpFormatError(directory, "not a directory") from error
    if len(entries) > MAX_FILES:
        raise DumpFormatError(directory, f"{len(entries)} files, at most {MAX_FILES} are looked at")
    return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}


def _read_safetensors(directory: Path, layout: PlainLayout, names: Mapping[str, int]) -> dict[str, TensorView]:
    files = [name for name in names if name.endswith(DUMP_SUFFIX)]
    if len(files) != 1:
        raise DumpFormatError(directory, f"holds {len(files)} files *{DUMP_SUFFIX}, not one")
    file = MappedFile(directory / files[0])
    missing = set(layout.tensors.values()) - file.spans.keys()
    if missing:
        raise DumpFormatError(directory, f"lacks the tensors {sorted(missing)}; it holds {sorted(file.spans)[:20]}")
    return {name: file.tensor(theirs) for name, theirs in layout.tensors.items()}


def _read_pt(directory: Path, layout: PlainLayout) -> dict[str, TensorView]:
    return {name: torch_files.read_tensor(directory / f"{stem}.pt") for name, stem in layout.tensors.items()}


def _hidden(directory: Path, name: str, tensor: TensorView, layout: PlainLayout) -> TensorView:
    """Check one tensor's dtype and shape, and give aux states their three dimensions."""
    shape = tensor.shape
    if tensor.dtype not in MODEL_DTYPES.values():
        raise DumpFormatError(directory, f"{name} is {tensor.dtype}, hidden states are {', '.join(MODEL_DTYPES.values())}")
    if name == AUX_HIDDEN_STATES and len(shape) == 2 and shape[1] % layout.aux_layers == 0:
        shape = (shape[0], layout.aux_layers, shape[1] // layout.aux_layers)
    wanted = 3 if name == AUX_HIDDEN_STATES else 2
    if len(shape) != wanted or 0 in shape or (wanted == 3 and shape[1] != layout.aux_layers):
        raise DumpFormatError(directory, f"{name} has shape {shape}, the layout has aux_layers = {layout.aux_layers}")
    return TensorView(tensor.dtype, shape, tensor.data)


class PlainPublisher:
    """Writes plain dumps, as a hand-patched server would: a counter, no identity. For the embedded worker and tests.

    Raises:
        TapError: the directory cannot be used.
    """

    def __init__(self, directory: Path, layout: PlainLayout) -> None:
        ensure_private_directory(directory)
        self._directory = directory
        self._layout = layout
        self._next = 1 + max((n for p in directory.iterdir() if (n := plain_number(p.name)) is not None), default=-1)

    def publish(self, tensors: Mapping[str, TensorView]) -> str:
        """Write `req_<N>/` and return its name.

        Raises:
            ValueError: the tensors are not the layout's.
            OSError: the file system refused; nothing is left behind.
        """
        if tensors.keys() != self._layout.tensors.keys():
            raise ValueError(f"the layout has {sorted(self._layout.tensors)}, not {sorted(tensors)}")
        name = f"{DUMP_PREFIX}{self._next}"
        self._next += 1
        target = self._directory / name
        renamed = self._layout.published_by == "rename"
        work = self._directory / f".{name}.tmp" if renamed else target
        work.mkdir(mode=0o700)
        try:
            self._write_files(work, {self._layout.tensors[ours]: tensor for ours, tensor in tensors.items()})
            if renamed:
                rename_noreplace(work, target)
            else:
                (work / self._layout.published_by).write_text("{}\n", encoding="utf-8")
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return name

    def _write_files(self, directory: Path, tensors: Mapping[str, TensorView]) -> None:
        if self._layout.kind == "pt":
            for stem, tensor in tensors.items():
                torch_files.write_tensor(directory / f"{stem}.pt", tensor)
            return
        path = directory / f"hidden_states{DUMP_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(descriptor, header.encode(tensors, page_aligned=False))
        finally:
            os.close(descriptor)
