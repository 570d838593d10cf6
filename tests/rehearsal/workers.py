"""`python -m tests.rehearsal.workers`: stand-in workers whose states depend on the sample, so that each has bytes of its own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import xxhash
from statetap_sglang.beacon import Beacon
from statetap_sglang.format import HIDDEN_TENSORS, TensorView

from tests.bench.stand_ins import States, main

# A prime, so that no regularity of the tokens' checksum shows in the places.
PLACES = 1009


class PlacedStates(States):
    """A sample's rows begin at one of `PLACES` rows of one block of random bytes, which its tokens decide."""

    def __init__(self, beacon: Beacon, longest: int) -> None:
        super().__init__(beacon, longest + PLACES)

    def first_row(self, tokens: np.ndarray) -> int:
        return zlib.crc32(tokens.data.cast("B")) % PLACES

    def expected(self, tokens: np.ndarray) -> Mapping[str, TensorView]:
        """What a store must have of a sample."""
        return self.hidden(len(tokens), self.first_row(tokens))

    def digest(self, tokens: np.ndarray) -> int:
        """As contract §3 has it: over the hidden arrays, in the layout's order."""
        hidden = self.expected(tokens)
        digest = xxhash.xxh3_64()
        for name in HIDDEN_TENSORS:
            if name in hidden:
                digest.update(hidden[name].data)
        return digest.intdigest()


if __name__ == "__main__":
    main(PlacedStates)
