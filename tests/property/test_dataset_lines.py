"""However a body is cut on its way, the same lines come out of it, under the same numbers."""

from __future__ import annotations

import gzip

from hypothesis import given
from hypothesis import strategies as st
from statetap.adapters.datasets import lines as module
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.lines import LineBatches

BODIES = st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"")), max_size=40).map(b"\n".join)
CUTS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    chunks, at, turn = [], 0, 0
    while at < len(body):
        size = cuts[turn % len(cuts)]
        chunks.append(body[at : at + size])
        at, turn = at + size, turn + 1
    return chunks


def numbered(body: bytes, cuts: list[int], batch_bytes: int, *, gzipped: bool) -> list[tuple[int, bytes]]:
    batch_size, module.BATCH_BYTES = module.BATCH_BYTES, batch_bytes
    try:
        lines = LineBatches(IntakeLimits(), gzipped=gzipped)
        batches = [batch for chunk in pieces(body, cuts) for batch in lines.feed(chunk)]
        batches += lines.finish()
    finally:
        module.BATCH_BYTES = batch_size
    assert all(batch.text.endswith(b"\n") for batch in batches[:-1])
    found = []
    for batch in batches:
        whole = batch.text.removesuffix(b"\n")
        found += list(enumerate(whole.split(b"\n"), batch.first_line))
    return found


@given(body=BODIES, cuts=CUTS, batch_bytes=st.integers(1, 200), gzipped=st.booleans())
def test_lines_do_not_depend_on_how_they_came(body, cuts, batch_bytes, gzipped):
    sent = gzip.compress(body) if gzipped else body
    expected = list(enumerate(body.removesuffix(b"\n").split(b"\n"), 1)) if body else []
    assert numbered(sent, cuts, batch_bytes, gzipped=gzipped) == expected
