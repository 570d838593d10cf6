"""Teaches zarr-python bfloat16, now or as soon as somebody imports it.

zarr-python 3.1 collects the entry-point group `zarr.data_type` and never loads it (later versions do), so the type has to be
registered by hand. Importing zarr takes half a second, which a command line that only speaks HTTP should not pay: where zarr is
not imported yet, a finder waits for its import and registers the type right after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
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
    """Finds nothing itself: it lets zarr's own loader call `_register` when the module has run."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _ZARR:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            # Only now: a spec may be looked up without an import (`importlib.util.find_spec`).
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
