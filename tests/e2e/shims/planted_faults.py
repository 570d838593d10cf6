"""Makes any one step of the plugin raise, while a control file names it: faults for a running server, none in the plugin's code.

Each step is replaced *inside* of what guards it, so that what is tested is how the plugin takes an error that it did not foresee.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PLUGIN = "statetap_sglang.sglang_plugin"

# Step -> the module whose global or class attribute it is, and what guards it there (None: its callers do).
STEPS: dict[str, tuple[str, str | None]] = {
    "SGLangPlugin.before_batch": (PLUGIN, "_guarded"),
    "SGLangPlugin.before_logits": (PLUGIN, "_guarded"),
    "SGLangPlugin._finish": (PLUGIN, "_guarded"),
    "extend_pass": (PLUGIN, None),
    "StateTap._reserve": ("statetap_sglang.state_tap", None),
    "StateTap.take_pre_norm": ("statetap_sglang.state_tap", "_loses_the_pass"),
    "StateTap.take_states": ("statetap_sglang.state_tap", "_loses_the_pass"),
    "StateTap._publish": ("statetap_sglang.state_tap", "_loses_the_pass"),
    "SnapshotRing.reserve": ("statetap_sglang.snapshot", None),
    "SnapshotRing.send": ("statetap_sglang.snapshot", None),
    "SampleSnapshot.add_checksums": ("statetap_sglang.snapshot", None),
    "host_views": ("statetap_sglang.state_tap", None),
    "DumpPublisher.reserve": ("statetap_sglang.publisher", None),
    "DumpPublisher.publish": ("statetap_sglang.publisher", None),
}
# This one step runs while the server starts, and cannot be chosen later.
START = "open_tap"


def arrange(control: str) -> None:
    """Plant the faults in this process when it imports the plugin; they sleep until the file `control` names one."""
    sys.meta_path.insert(0, _AfterImport(Path(control)))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Steps aside for good once the plugin's outermost module is about to be imported, and plants after it was."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PLUGIN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(PLUGIN)
        assert spec is not None
        assert spec.loader is not None
        loader = spec.loader
        execute = loader.exec_module

        def exec_and_plant(module: ModuleType) -> None:
            execute(module)
            for step, (home, guard) in {**STEPS, START: (PLUGIN, None)}.items():
                _plant(sys.modules[home], step, guard, self._control)

        loader.exec_module = exec_and_plant  # type: ignore[method-assign]
        return spec


def _plant(module: ModuleType, step: str, guard: str | None, control: Path) -> None:
    *owner, name = step.split(".")
    place: Any = getattr(module, owner[0]) if owner else module
    original: Callable[..., Any] = getattr(place, name)
    if guard is not None:
        original = original.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if control.exists() and control.read_text(encoding="utf-8") == step:
            raise RuntimeError(f"planted in {step}")
        return original(*args, **kwargs)

    setattr(place, name, faulty if guard is None else getattr(module, guard)(faulty))
