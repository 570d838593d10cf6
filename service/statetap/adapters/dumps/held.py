"""A dump that the service holds: facts and views, until it is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from statetap_sglang.format import HIDDEN_TENSORS, MODEL_DTYPES, ROW_CHECKSUMS, TensorView
from statetap_sglang.plain import PlainDump
from statetap_sglang.reader import MappedDump

from statetap.core.dumps import DumpFacts

_MODEL_DTYPE = {theirs: ours for ours, theirs in MODEL_DTYPES.items()}


def describe(tensors: Mapping[str, TensorView]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """The hidden tensors as `DumpFacts.tensors`, in the store's order."""
    return tuple((name, _MODEL_DTYPE[tensors[name].dtype], tensors[name].shape) for name in HIDDEN_TENSORS if name in tensors)


class HeldDump:
    """Implements the port `Dump` over a mapped file or directory. `release` may be called from any thread."""

    def __init__(self, facts: DumpFacts, mapped: MappedDump | PlainDump, remove: Callable[[], None]) -> None:
        self.facts = facts
        self.views: Mapping[str, memoryview] = {
            name: tensor.data for name, tensor in mapped.tensors.items() if name in HIDDEN_TENSORS
        }
        checksums = mapped.tensors.get(ROW_CHECKSUMS)
        self.row_checksums = None if checksums is None else checksums.data
        self._mapped = mapped
        self._remove = remove
        self._released = False

    def release(self) -> None:
        """Drop the mapping and remove it from the directory, in this order: its publisher may write over what is handed back.

        Idempotent. OSError: it could not be removed; nothing is left of its views, and it may be tried again.
        """
        if self._released:
            return
        self.views = {}
        self.row_checksums = None
        self._mapped.close()
        self._remove()
        self._released = True
