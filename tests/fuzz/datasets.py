"""What reads datasets: gzip and lines, then JSON, checks, tokenising and masks of each line."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
from statetap.adapters.datasets.arrow_file import COLUMNS
from statetap.adapters.datasets.encoding import Rules, encode_batch
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.lines import LineBatch, LineBatches
from statetap.adapters.datasets.tokenizer import TokenizerSource, bind
from statetap.ports import DatasetRefused

from tests.fakes.datasets import CHATML_MARKED, make_tokenizer
from tests.fuzz.targets import Target

SAMPLES = (
    {"id": "a", "input_ids": [1, 2, 3, 399], "loss_mask": [0, 1, 1, 1]},
    {"input_ids": [5], "text": None, "extra": {"deep": [1, {"er": True}]}},
    {"id": 7, "text": "hello there,\nhow are you?"},
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be kind"}]}, {"role": "assistant", "content": ""}]},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]},
)


def targets(folder: Path) -> list[Target]:
    """All of them; the tokenizers are made below `folder`."""
    limits = IntakeLimits(line_bytes=20_000, body_bytes=200_000, ratio_from_bytes=50_000, gzip_ratio=20, messages=50)
    lines = [orjson.dumps(sample) for sample in SAMPLES]
    body = b"\n".join([*lines, b"", b" "]) + b"\n"
    packed = gzip.compress(body, mtime=0) + gzip.compress(lines[0], mtime=0)
    bomb = gzip.compress(b"[" * 3_000_000, mtime=0)
    found = [
        Target("lines", [body, body * 50], _cutter(limits, gzipped=False), DatasetRefused, weight=10),
        Target("gzip", [packed, bomb], _cutter(limits, gzipped=True), DatasetRefused, weight=10),
    ]
    for name, template in (("plain", None), ("marked", CHATML_MARKED)):
        (folder / name).mkdir()
        options = {} if template is None else {"chat_template": template}
        model = str(make_tokenizer(folder / name, vocab_size=400, **options))
        source = TokenizerSource(model, model)
        bind(source)
        rules = Rules(source, limits, allow_empty_mask=name == "marked")
        found.append(Target(f"samples, {name} template", [*lines, body], _encoder(rules), DatasetRefused, weight=15))
    return found


def _cutter(limits: IntakeLimits, *, gzipped: bool) -> Callable[[bytes, random.Random], None]:
    def run(data: bytes, rng: random.Random) -> None:
        cutter = LineBatches(limits, gzipped=gzipped)
        text, at = b"", 0
        while at < len(data):
            size = rng.choice((1, 100, 5000, 1 << 20))
            size = max(size, len(data) // 50)
            text += b"".join(batch.text for batch in cutter.feed(data[at : at + size]))
            at += size
        text += b"".join(batch.text for batch in cutter.finish())
        assert gzipped or text == data

    return run


def _encoder(rules: Rules) -> Callable[[bytes, random.Random], None]:
    def run(data: bytes, _rng: random.Random) -> None:
        batch = encode_batch(rules, LineBatch(1, data))
        records = pa.ipc.read_record_batch(pa.py_buffer(batch.records), COLUMNS)
        records.validate(full=True)
        assert records.num_rows == len(batch.lines)
        for ids, mask in zip(records.column("input_ids").to_pylist(), records.column("loss_mask").to_pylist(), strict=True):
            assert ids
            assert len(ids) == len(mask)
            assert 0 <= min(ids) <= max(ids) < 400
            assert set(mask) <= {0, 1}

    return run
