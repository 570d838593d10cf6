from __future__ import annotations

import json
from typing import Any

import pytest
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.samples import Chat, Text, Tokens, read_sample
from statetap.ports import DatasetRefused

LIMITS = IntakeLimits(messages=3)


def read(record: Any) -> Any:
    return read_sample(json.dumps(record).encode(), 4, LIMITS)


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ({"input_ids": [1, 2]}, Tokens([1, 2], None)),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, Tokens([1, 2], [0, 1])),
        ({"text": "hello", "source": "unknown keys are kept out"}, Text("hello")),
        ({"text": "hello", "messages": None, "loss_mask": None}, Text("hello")),
        ({"messages": [{"role": "user", "content": "a"}]}, Chat([{"role": "user", "content": "a"}], "messages")),
    ],
)
def test_each_form_is_read(record, content):
    assert read(record).content == content


def test_sharegpt_speakers_become_roles():
    chat = read(
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "tool", "value": "c"}]}
    )
    assert [message["role"] for message in chat.content.messages] == ["user", "assistant", "tool"]
    assert [message["content"] for message in chat.content.messages] == ["a", "b", "c"]


def test_text_parts_are_joined_and_other_keys_of_a_message_stay():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = read({"messages": [{"role": "tool", "content": parts, "name": "clock"}]})
    assert chat.content.messages == [{"role": "tool", "content": "one two", "name": "clock"}]


@pytest.mark.parametrize(("given", "read_as"), [({}, "4"), ({"id": None}, "4"), ({"id": "é-1"}, "é-1"), ({"id": 12}, "12")])
def test_an_id_is_text_an_integer_or_the_line(given, read_as):
    assert read({"text": "a"} | given).id == read_as


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (b"{", None, "not JSON"),
        (b'{"text": "\xff"}', None, "not JSON"),
        (b'{"input_ids": [NaN]}', None, "not JSON"),
        (b"[1]", None, "JSON list, not an object"),
        (b"{}", None, "none of input_ids"),
        (b'{"text": "a", "input_ids": [1]}', None, "input_ids and text"),
        (b'{"messages": [], "conversations": []}', None, "messages and conversations"),
        (b'{"text": "a", "loss_mask": [1]}', "loss_mask", "goes with input_ids"),
        (b'{"text": "a", "id": ""}', "id", "an id is text"),
        (b'{"text": "a", "id": true}', "id", "an id is text"),
        (b'{"text": "a", "id": 1.5}', "id", "an id is text"),
        (b'{"text": 5}', "text", "must be text, not number"),
        (b'{"input_ids": "1 2"}', "input_ids", "list of integers"),
        (b'{"input_ids": []}', "input_ids", "empty"),
        (b'{"input_ids": [1, true]}', "input_ids", "boolean at position 1"),
        (b'{"input_ids": [1, 2, 3.0]}', "input_ids", "fraction at position 2"),
        (b'{"input_ids": [1, null]}', "input_ids", "null at position 1"),
        (b'{"input_ids": [[1]]}', "input_ids", "list at position 0"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask", "1 values for 2"),
        (b'{"input_ids": [1, 2], "loss_mask": [0, 2]}', "loss_mask", "value 2 at position 1"),
        (b'{"input_ids": [1, 2], "loss_mask": [true, false]}', "loss_mask", "boolean at position 0"),
        (b'{"messages": {}}', "messages", "list of messages"),
        (b'{"messages": []}', "messages", "is empty"),
        (b'{"messages": ["hi"]}', "messages[0]", "an object with role"),
        (b'{"messages": [{"role": "narrator", "content": "a"}]}', "messages[0].role", "unknown role 'narrator'"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "messages[0].role", "unknown role"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content", "no content"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "must be text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0]", "'image_url'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}', "messages[0].content[0]", "'input_audio'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "video"}]}]}', "messages[0].content[0]", "'video'"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "messages[0].content[0]", "without a type"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text", "needs its text"),
        (b'{"messages": [1, 2, 3, 4]}', "messages", "at most 3"),
        (b'{"conversations": [1]}', "conversations[0]", "an object with from"),
        (b'{"conversations": [{"from": "narrator", "value": "a"}]}', "conversations[0].from", "unknown speaker"),
        (b'{"conversations": [{"from": {}, "value": "a"}]}', "conversations[0].from", "unknown speaker"),
        (b'{"conversations": [{"from": "gpt"}]}', "conversations[0].value", "no content"),
    ],
)
def test_a_faulty_line_is_refused_by_line_and_field(text, field, reason):
    with pytest.raises(DatasetRefused) as caught:
        read_sample(text, 4, LIMITS)
    assert (caught.value.line, caught.value.field) == (4, field)
    assert reason in caught.value.reason
