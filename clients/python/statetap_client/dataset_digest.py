"""A dataset's sha256: over what its samples are, not over how they were sent. Both the service and `verify` compute it here.

It is the SHA-256 of the SHA-256s of all samples' records in order. A record is the id's UTF-8 length (uint32), the id, the number
of tokens (uint32), the ids (int32) and the mask (uint8), little-endian.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray


def sample_digest(sample_id: str, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> bytes:
    """SHA-256 of one sample's record; `input_ids` and `loss_mask` are `[T]`."""
    name = sample_id.encode()
    digest = hashlib.sha256(struct.pack("<I", len(name)) + name + struct.pack("<I", len(input_ids)))
    digest.update(input_ids.astype("<i4", copy=False).tobytes())
    digest.update(loss_mask.tobytes())
    return digest.digest()
