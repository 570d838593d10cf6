"""Teaches zarr-python bfloat16, now or as soon as somebody imports it.

zarr-python 3.1 collects the entry-point group `zarr.data_type` and never loads it (later versions do), so the type has to be
registered by hand. Importing zarr takes half a second, which a command line that only speaks HTTP should not pay: where zarr is
not imported yet, a finder waits for its import and registers the type right after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ZARR = "zarr"


def register_bfloat16() -> None:
    """Register `statetap_client.bfloat16.BFloat16` with zarr-python's data types. Idempotent."""
    if _ZARR in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterZarr) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterZarr())


def _register() -> None:
    from zarr.dtype import data_type_registry

    from statetap_client.bfloat16 import BFloat16

    data_type_registry.register("bfloat16", BFloat16)


class _AfterZarr(MetaPathFinder):
    """Finds nothing itself: it has zarr loaded by its own loader, and then calls `_register`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _ZARR:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadAndRegister(spec.loader, self)
        return spec


class _LoadAndRegister(Loader):
    """Stands in for a loader until it has run. Wrapped, not patched: some loaders serve many modules."""

    def __init__(self, loader: Loader, finder: _AfterZarr) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Only now: a spec may be looked up without an import (`importlib.util.find_spec`).
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()
