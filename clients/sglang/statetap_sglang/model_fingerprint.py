"""A model's fingerprint: equal for two servers of one model, different where the states would be.

It covers the config, the quantisation, the KV cache's dtype, LoRA, and the checkpoint: each weight file's name, size, and evenly
spaced samples of its bytes, a safetensors header among them. Samples are enough: weights that were trained further differ nearly
everywhere. How many devices serve the model does not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096

# What a config says beside the model itself: where it was, who wrote it, and what dtype it was stored in.
_BESIDE_THE_MODEL = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"})


def model_fingerprint(config: Mapping[str, Any], served: Mapping[str, Any], checkpoint: Path | None) -> str:
    """64 hex digits.

    `config` is the model's (as `PretrainedConfig.to_dict` gives it), `served` how it is served (dtype, quantisation, KV cache
    dtype, LoRA, revision), `checkpoint` the file or directory of its weights, None where it is not on this machine.
    """
    digest = hashlib.sha256(_canonical(config))
    digest.update(_canonical(served))
    for file in _weight_files(checkpoint):
        size = file.stat().st_size
        digest.update(_canonical({"file": file.name, "bytes": size}))
        with file.open("rb") as opened:
            for i in range(_SAMPLES):
                opened.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _weight_files(checkpoint: Path | None) -> list[Path]:
    if checkpoint is None:
        return []
    if checkpoint.is_file():
        return [checkpoint]
    return sorted({file for pattern in _WEIGHTS for file in checkpoint.glob(pattern)})


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(value), sort_keys=True, default=_named, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """`value` without what stands beside the model, at any depth, and with every key a string."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if str(key) not in _BESIDE_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _named(value: object) -> str:
    """A value that JSON has not. Where its text holds an address, which changes from run to run, its type must do."""
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
