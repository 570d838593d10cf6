"""Stands in for SGLang's compiled kernels on a CPU without AMX.

It registers no `torch.ops.sgl_kernel` operator, so SGLang finds no AMX support and every layer takes its plain torch path. What
that path calls of the package itself is here; any other kernel is importable and refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offsets: torch.Tensor,
    end_offsets: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *unused: Any,
) -> None:
    """Write each request's new cache slots into its row of `req_to_token`, in place."""
    spans = zip(req_pool_indices.tolist(), start_offsets.tolist(), end_offsets.tolist(), strict=False)
    taken = 0
    for row, start, end in spans:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the kernel sgl_kernel.{name} does not run on this CPU: it is a stand-in for tests")

    return absent
