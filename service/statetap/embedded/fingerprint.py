"""A model's fingerprint: equal for the same weights in any process, different for others of the same shape.

It covers the config, the quantisation, and each tensor's name, shape, dtype and content: small tensors whole, large ones by
evenly spaced samples. Weights that were trained further differ nearly everywhere, so samples are enough and cost little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson
import torch

SAMPLED_ELEMENTS = 4096

# What a config says beside the model itself: where it was, who wrote it, and what dtype it was stored in.
_BESIDE_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})


def fingerprint(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> str:
    """64 hex digits over a model's config (as `PretrainedConfig.to_dict` gives it) and its state dict."""
    described = {key: value for key, value in config.items() if key not in _BESIDE_THE_MODEL}
    digest = hashlib.sha256(orjson.dumps(described, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(orjson.dumps([name, list(tensor.shape), str(tensor.dtype)]))
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    # Odd, because widths are mostly even: a stride that divides a row would look at the same few columns over and over.
    stride = max(1, flat.numel() // SAMPLED_ELEMENTS) | 1
    return flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes()
