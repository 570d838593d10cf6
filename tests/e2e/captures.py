"""What a tap published for a request, put together by the test itself: plain code that shares nothing with the service's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from statetap_sglang.checksum import differing_rows
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.format import ROW_CHECKSUMS, DumpMetadata
from statetap_sglang.reader import open_dump

from tests.e2e.server import SglangServer
from tests.fakes.cluster import until

States = dict[str, np.ndarray]
"""`token_ids` [T] and the hidden arrays, rows first."""


@dataclass(frozen=True, slots=True)
class Published:
    """A dump that was read and released."""

    metadata: DumpMetadata
    states: States

    @property
    def first(self) -> int:
        return self.metadata.prefix_len

    @property
    def last(self) -> int:
        return self.metadata.prefix_len + self.metadata.extend_len


class Lost(AssertionError):
    """The plugin said that a capture is lost; the message is its reason."""


def named_dumps(answer: dict[str, Any]) -> list[str]:
    """All names that a response carries: there is one list for each output token, or for the passes that published."""
    values = [value for value in answer["meta_info"]["statetap_dumps"] if value]
    return sorted({name for value in values for name in value})


def take_dumps(server: SglangServer, answer: dict[str, Any]) -> list[Published]:
    """The dumps that a response names, once they are there.

    Raises:
        Lost: one of them is an error record.
    """
    names = named_dumps(answer)
    assert names, answer["meta_info"]
    taken = [_take(server.dumps / server.name / name) for name in names]
    assert {dump.metadata.rid for dump in taken} == {answer["meta_info"]["id"]}
    return sorted(taken, key=lambda dump: dump.metadata.forward_pass)


def sweep(server: SglangServer) -> list[DumpMetadata]:
    """Remove what the tap holds; the metadata of what strangers and the server itself had published."""
    strays = []
    for file in server.tap().glob("req_*.safetensors"):
        with open_dump(file) as dump:
            strays.append(dump.metadata)
        file.unlink()
    return strays


def _take(stem: Path) -> Published:
    file, record = stem.with_name(f"{stem.name}.safetensors"), stem.with_name(f"{stem.name}.error.json")
    until(f"{stem} published", lambda: file.exists() or record.exists())
    if record.exists():
        raise Lost(ErrorRecord.read(record).reason)
    with open_dump(file) as dump:
        assert ROW_CHECKSUMS in dump.tensors
        assert differing_rows(dump.tensors) == []
        types = {"I32": np.int32, "F32": np.float32, "I64": np.int64}
        states = {
            name: np.frombuffer(view.data, types[view.dtype]).reshape(view.shape).copy()
            for name, view in dump.tensors.items()
            if name != ROW_CHECKSUMS
        }
        metadata = dump.metadata
    file.unlink()
    return Published(metadata, states)


def captures_of(prompt: Sequence[int], dumps: Sequence[Published]) -> list[States]:
    """The captures that the dumps of one request make: one for each generation whose ranges tile `[0, T)` exactly.

    Rows beyond the prompt must not have been published, and every row must be of the prompt's token there.
    """
    generations: dict[int, list[Published]] = defaultdict(list)
    for dump in dumps:
        assert dump.metadata.prompt_len == len(prompt)
        assert dump.last <= len(prompt), "a row that is not the prompt's"
        assert dump.states["token_ids"].tolist() == list(prompt[dump.first : dump.last])
        generations[dump.metadata.retraction_count].append(dump)
    captures = []
    for _, parts in sorted(generations.items()):
        parts.sort(key=lambda dump: dump.first)
        edges = [0, *(dump.last for dump in parts)]
        if edges[:-1] == [dump.first for dump in parts] and edges[-1] == len(prompt):
            captures.append({name: np.concatenate([dump.states[name] for dump in parts]) for name in parts[0].states})
    return captures
