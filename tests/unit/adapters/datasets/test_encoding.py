from __future__ import annotations

import hashlib
import json

import pyarrow as pa
import pytest
from statetap.adapters.datasets.arrow_file import COLUMNS
from statetap.adapters.datasets.encoding import EncodedBatch, Rules, encode_batch
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.lines import LineBatch
from statetap.adapters.datasets.tokenizer import TokenizerSource, bind
from statetap.ports import DatasetRefused


@pytest.fixture
def encode(plain_model):
    def run(*lines: object, first_line: int = 1, allow_empty_mask: bool = False, **limits: int) -> EncodedBatch:
        rules = Rules(TokenizerSource("tiny", str(plain_model)), IntakeLimits(**limits), allow_empty_mask)
        text = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        return encode_batch(rules, LineBatch(first_line, text))

    return run


def rows(batch: EncodedBatch) -> list[dict[str, object]]:
    read: list[dict[str, object]] = pa.ipc.read_record_batch(pa.py_buffer(batch.records), COLUMNS).to_pylist()
    return read


def test_samples_become_rows(encode, plain_model):
    batch = encode({"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}, {"text": "hello there"})
    hello = bind(TokenizerSource("tiny", str(plain_model))).tokenizer("hello there")["input_ids"]
    assert rows(batch) == [
        {"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "2", "input_ids": hello, "loss_mask": [1] * len(hello)},
    ]
    assert (batch.tokens, batch.max_tokens) == (2 + len(hello), len(hello))


def test_blank_lines_are_passed_over_but_counted(encode):
    batch = encode(b"", {"input_ids": [1]}, b" \t\r", {"input_ids": [2]}, b"", first_line=10)
    assert batch.lines.tolist() == [11, 13]
    assert [row["id"] for row in rows(batch)] == ["11", "13"]
    assert rows(encode(b"", b"")) == []


def test_a_records_digest_is_over_id_tokens_and_mask(encode):
    batch = encode({"id": "é", "input_ids": [1, 258], "loss_mask": [0, 1]})
    record = b"\2\0\0\0" + "é".encode() + b"\2\0\0\0" + b"\1\0\0\0\2\1\0\0" + b"\0\1"
    assert batch.digests == hashlib.sha256(record).digest()


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        ({"input_ids": [1, 400]}, "input_ids", "id 400 is outside the vocabulary of model 'tiny', which is 0 to 399"),
        ({"input_ids": [1, -1]}, "input_ids", "id -1"),
        ({"input_ids": [1 << 40]}, "input_ids", "id 1099511627776"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "loss_mask", "all 0"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages", "without an assistant message"),
        ({"text": ""}, "text", "no tokens"),
        (b"{", None, "not JSON"),
    ],
)
def test_the_first_faulty_line_is_refused(encode, line, field, reason):
    with pytest.raises(DatasetRefused) as caught:
        encode({"input_ids": [1]}, line, b"also faulty", first_line=7)
    assert (caught.value.line, caught.value.field) == (8, field)
    assert reason in caught.value.reason


def test_the_highest_id_of_the_vocabulary_is_taken(encode):
    assert rows(encode({"input_ids": [0, 399]}))[0]["input_ids"] == [0, 399]


def test_an_empty_mask_may_be_allowed(encode):
    batch = encode({"input_ids": [1, 2], "loss_mask": [0, 0]}, allow_empty_mask=True)
    assert rows(batch)[0]["loss_mask"] == [0, 0]


def test_a_line_that_came_whole_may_still_be_too_long(encode):
    with pytest.raises(DatasetRefused, match="longer than 20 bytes") as caught:
        encode({"input_ids": [1]}, {"input_ids": [1, 2, 3, 4, 5]}, line_bytes=20)
    assert caught.value.line == 2
