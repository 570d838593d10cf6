"""What each process of a test server does at its start: lets torchvision be imported, and arranges for planted faults.

SGLang imports torchvision, whose compiled part is made for CUDA and does not load beside a torch that is made for CPUs. Its
Python part then describes two operators that nobody has declared; they are declared here, just before it is imported.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

# Schemas from torchvision 0.28 (`csrc/ops/nms.cpp`, `csrc/ops/quantized`).
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is about to be found, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                # Kept on the module: operators vanish with the library object.
                self.library = torch.torchvision_operators = torch.library.Library("torchvision", "DEF")
                for schema in OPERATORS:
                    self.library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())

# A server imports six thousand modules in each of three processes: collecting garbage meanwhile takes a tenth of that.
gc.set_threshold(100_000, 20, 50)

if "E2E_PLANTED_FAULTS" in os.environ:
    import planted_faults

    planted_faults.arrange(os.environ["E2E_PLANTED_FAULTS"])
