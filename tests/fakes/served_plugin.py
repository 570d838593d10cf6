"""A stub server with the plugin in it, and what it published."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from statetap_sglang.beacon import Beacon
from statetap_sglang.error_record import ErrorRecord
from statetap_sglang.reader import MappedDump, open_dump

from tests.fakes.sglang_stub import HookRegistry, StubModel, StubRequest, StubServer

LAYERS = 6


class Served:
    """A stub server with the plugin in it, and what it published."""

    def __init__(self, module: Any, root: Path, model: StubModel | None, arguments: dict[str, Any]) -> None:
        self.plugin = HookRegistry.hooks[module.LOADED][0].__self__
        self.root = root
        self.server = StubServer(module, model, **arguments)
        self.model = self.server.model

    @property
    def tap(self) -> Path:
        (tap,) = (self.root / "w").iterdir()
        return tap

    def run(self, *args: Any, **kwargs: Any) -> Any:
        result = self.server.run(*args, **kwargs)
        if self.plugin.open is not None:
            self.plugin.open.background.drain()
        return result

    def dumps(self, rid: str | None = None) -> list[MappedDump]:
        dumps = [open_dump(path) for path in self.tap.glob("req_*.safetensors")]
        for dump in dumps:
            dump.verify_rows()
        chosen = [dump for dump in dumps if rid in (None, dump.metadata.rid)]
        return sorted(chosen, key=lambda dump: (dump.metadata.rid, dump.metadata.forward_pass))

    def errors(self) -> dict[str, str]:
        return {record.rid: record.reason for record in map(ErrorRecord.read, self.tap.glob("req_*.error.json"))}

    def demand(self, request: StubRequest, ranges: list[tuple[int, int]], retraction: int = 0) -> None:
        """The request's dumps hold exactly these ranges, `[prefix, end)`, of its prompt's states."""
        dumps = [dump for dump in self.dumps(request.rid) if dump.metadata.retraction_count == retraction]
        assert [(d.metadata.prefix_len, d.metadata.prefix_len + d.metadata.extend_len) for d in dumps] == ranges
        reference = self.model.reference(request.origin_input_ids)
        beacon = Beacon.read(self.tap)
        for dump, (start, stop) in zip(dumps, ranges, strict=True):
            assert dump.metadata.prompt_len == len(request.origin_input_ids)
            assert array(dump, "token_ids").tolist() == request.origin_input_ids[start:stop]
            expected = {"last_hidden_states": reference["post_norm"], "last_hidden_states_prenorm": reference["pre_norm"]}
            if beacon.aux_layer_ids:
                expected["aux_hidden_states"] = torch.stack([reference[f"L{i}"] for i in beacon.aux_layer_ids], dim=1)
            for name in dump.tensors.keys() - {"token_ids", "row_checksums"}:
                # Rows of a pass that holds others round otherwise, on some processors by several units; rows differ by far more.
                np.testing.assert_allclose(array(dump, name), expected[name][start:stop].numpy(), rtol=1e-5, atol=2e-6)


def array(dump: MappedDump, name: str) -> np.ndarray[Any, Any]:
    view = dump.tensors[name]
    return np.frombuffer(view.data, {"F32": np.float32, "I32": np.int32}[view.dtype]).reshape(view.shape)


Serve = Callable[..., Served]


_ids = itertools.count(1)


def request(length: int, **changes: Any) -> StubRequest:
    number = next(_ids)
    prompt = [(number * 7 + 3 * i) % 50 for i in range(length)]
    return StubRequest(f"rid-{number}", prompt, **changes)
