"""What reads the files of taps: dumps, plain dumps, beacons and error records."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from statetap_sglang import header
from statetap_sglang.beacon import Beacon
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.format import BEACON_NAME, DumpFormatError
from statetap_sglang.plain import PlainLayout, PlainPublisher, open_plain_dump
from statetap_sglang.reader import open_dump

from tests.fakes.dumps import make_beacon, make_metadata, make_tensors
from tests.fuzz.targets import Target


def targets(folder: Path) -> list[Target]:
    """All of them, each over a file of its own in `folder`."""
    beacon = make_beacon()
    dump = b"".join(header.encode(make_tensors(beacon, 5), make_metadata("rid", 5, prompt_len=5).to_map(), page_aligned=True))
    small = b"".join(header.encode(make_tensors(beacon, 1), make_metadata("r", 1).to_map(), page_aligned=True))
    beacon.write(folder)
    said = (folder / BEACON_NAME).read_bytes()
    record = ErrorRecord("rid", "no space is left").encode()
    return [
        Target("dump", [dump, small], _reader(folder / "req_0.safetensors", _read_dump), DumpFormatError, weight=40),
        Target(
            "beacon", [said], _reader(folder / BEACON_NAME, lambda path: Beacon.read(path.parent)), DumpFormatError, weight=10
        ),
        Target("error record", [record], _reader(folder / "req_1.error.json", ErrorRecord.read), DumpFormatError, weight=5),
        *(_plain(folder, kind) for kind in ("safetensors", "pt")),
    ]


def _plain(folder: Path, kind: str) -> Target:
    beacon = make_beacon()
    layout = PlainLayout.default(aux_layers=len(beacon.aux_layer_ids), final=beacon.final, kind=kind)
    tensors = {name: tensor for name, tensor in make_tensors(beacon, 5).items() if name in layout.tensors}
    root = folder / kind
    directory = root / PlainPublisher(root, layout).publish(tensors)
    files = sorted(directory.iterdir())
    whole = [file.read_bytes() for file in files]

    def read(data: bytes, rng: random.Random) -> None:
        broken = rng.randrange(len(files))
        for at, file in enumerate(files):
            file.write_bytes(data if at == broken else whole[at])
        with open_plain_dump(directory, layout) as dump:
            _touch(dump.tensors.values())

    return Target(f"plain {kind}", whole, read, DumpFormatError, weight=8 if kind == "safetensors" else 1)


def _reader(path: Path, read: Callable[[Path], object]) -> Callable[[bytes, random.Random], None]:
    def run(data: bytes, _rng: random.Random) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(data)
        read(path)

    return run


def _read_dump(path: Path) -> None:
    with open_dump(path) as dump:
        _touch(dump.tensors.values())


def _touch(tensors: object) -> None:
    """Read every byte that is promised: a view beyond the file's end would be a SIGBUS."""
    for tensor in tensors:  # type: ignore[attr-defined]
        assert len(tensor.data.tobytes()) == tensor.nbytes
