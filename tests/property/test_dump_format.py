"""The dump format under every shape that may come, and every byte that must not."""

from __future__ import annotations

import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from statetap_sglang import header
from statetap_sglang.beacon import Beacon
from statetap_sglang.format import MODEL_DTYPES, DumpFormatError, DumpMetadata, TensorView
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.reader import open_dump

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@st.composite
def beacons(draw: st.DrawFn) -> Beacon:
    layers = draw(st.lists(st.integers(0, 7), unique=True, max_size=5).map(sorted))
    finals = ["post_norm", "pre_norm", "both"] + (["none"] if layers else [])
    return make_beacon(
        aux_layer_ids=tuple(layers),
        final=draw(st.sampled_from(finals)),
        hidden_size=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(list(MODEL_DTYPES))),
    )


def metadata(rows: int) -> st.SearchStrategy[DumpMetadata]:
    counts, lengths = st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 31) - 1)
    return st.builds(
        DumpMetadata,
        boot_id=st.just("boot1"),
        rid=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        prefix_len=lengths,
        extend_len=st.just(rows),
        prompt_len=st.none() | lengths,
        retraction_count=counts,
        forward_pass=counts,
        forward_start_ns=counts,
        forward_end_ns=counts,
    )


@QUICK
@given(data=st.data(), beacon=beacons(), rows=st.integers(1, 200))
def test_a_dump_comes_back_as_it_was(shm: Path, data: st.DataObject, beacon: Beacon, rows: int) -> None:
    said, tensors = data.draw(metadata(rows)), make_tensors(beacon, rows)
    publisher = DumpPublisher(shm / "dumps", "worker", beacon)
    try:
        path = publisher.directory / publisher.publish(said, tensors)
    finally:
        publisher.close()
    with open_dump(path) as dump:
        assert dump.metadata == said
        assert set(dump.tensors) == set(tensors)
        for name, tensor in tensors.items():
            read = dump.tensors[name]
            assert (read.dtype, read.shape, bytes(read.data)) == (tensor.dtype, tensor.shape, bytes(tensor.data))
            assert np.frombuffer(read.data, np.uint8).ctypes.data % 4096 == 0
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            assert file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes() == bytes(tensor.data)
    path.unlink()


@QUICK
@given(
    tensors=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: not name.startswith("_")),
        st.tuples(st.sampled_from(["U8", "BF16", "F16", "I32", "F32", "I64"]), st.lists(st.integers(0, 9), max_size=4)),
        max_size=6,
    ),
    page_aligned=st.booleans(),
)
def test_headers_come_back_as_they_were(tensors: dict[str, tuple[str, list[int]]], page_aligned: bool) -> None:
    views = {}
    for name, (dtype, shape) in tensors.items():
        empty = TensorView(dtype, tuple(shape), memoryview(b""))
        views[name] = TensorView(dtype, tuple(shape), memoryview(bytes(empty.nbytes)))
    text, *data = header.encode(views, {"key": "value"}, page_aligned=page_aligned)
    said, spans = header.decode("it", bytes(text[8:]), sum(map(len, data)))
    assert said == {"key": "value"}
    assert {name: (span.dtype, list(span.shape)) for name, span in spans.items() if not name.startswith("_pad_")} == tensors


def original() -> bytes:
    """A small dump."""
    tensors = make_tensors(make_beacon(), 5)
    return b"".join(header.encode(tensors, make_metadata("rid", 5, prompt_len=5).to_map(), page_aligned=True))


def try_to_open(path: Path, raw: bytes) -> bool:
    """Whether it opens; anything but DumpFormatError fails the test."""
    path.write_bytes(raw)
    try:
        with open_dump(path) as dump:
            return sum(len(tensor.data.tobytes()) for tensor in dump.tensors.values()) <= len(raw)
    except DumpFormatError:
        return False


def test_mutated_headers_are_refused_or_harmless(shm: Path) -> None:
    raw, rng = original(), random.Random(1)
    used = 8 + raw[8:].index(b"  ")
    alphabet = b'0123456789-.eE"{}[]:,\\ truefalsn\x00\xff'
    opened = 0
    for _ in range(4000):
        mutated = bytearray(raw)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            mutated[rng.randrange(used)] = rng.choice(alphabet) if rng.random() < 0.7 else rng.randrange(256)
        opened += try_to_open(shm / "req_0.safetensors", bytes(mutated))
    assert opened < 3000  # the digits of a counter or a letter of the rid may change


def test_spliced_headers_are_refused_or_harmless(shm: Path) -> None:
    raw, rng = original(), random.Random(2)
    length = struct.unpack("<Q", raw[:8])[0]
    text = raw[8 : 8 + length].rstrip()
    for _ in range(1500):
        start, end = sorted(rng.choices(range(len(text)), k=2))
        source = rng.randrange(len(text))
        spliced = text[:start] + text[source : source + rng.randrange(60)] + text[end:]
        try_to_open(shm / "req_0.safetensors", struct.pack("<Q", length) + spliced.ljust(length)[:length] + raw[8 + length :])


def test_every_truncation_is_refused(shm: Path) -> None:
    raw = original()
    assert try_to_open(shm / "req_0.safetensors", raw)
    for length in [*range(700), *range(700, len(raw), 97), len(raw) - 1]:
        assert not try_to_open(shm / "req_0.safetensors", raw[:length])
