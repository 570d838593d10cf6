from __future__ import annotations

from typing import Any

import pytest
from statetap.embedded.requests import BadRequest, SampleRequest, parse_generate


def parse(body: Any, context_length: int = 100) -> tuple[list[SampleRequest], bool]:
    return parse_generate(body, context_length=context_length, tokenize=lambda text: [len(word) for word in text.split()])


def test_a_single_prompt() -> None:
    body = {
        "input_ids": [5, 6],
        "rid": "r",
        "extra_key": "k",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }
    expected = SampleRequest(rid="r", token_ids=(5, 6), extra_key="k", max_new_tokens=1, ignore_eos=True)
    assert parse(body) == ([expected], False)


def test_a_batch_with_its_own_keys_and_parameters() -> None:
    samples, batched = parse(
        {
            "input_ids": [[5], [6, 7]],
            "rid": ["a", "b"],
            "extra_key": ["x", "y"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 0}],
        }
    )
    assert batched
    assert [(s.rid, s.token_ids, s.extra_key, s.max_new_tokens) for s in samples] == [("a", (5,), "x", 1), ("b", (6, 7), "y", 0)]


def test_one_key_serves_a_whole_batch_and_one_rid_is_numbered() -> None:
    samples, _ = parse({"input_ids": [[5], [6]], "rid": "r", "extra_key": "k", "sampling_params": {"max_new_tokens": 3}})
    assert [(s.rid, s.extra_key, s.max_new_tokens) for s in samples] == [("r_0", "k", 3), ("r_1", "k", 3)]


def test_rids_are_made_up_where_there_are_none() -> None:
    samples, _ = parse({"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1}})
    assert samples[0].rid != samples[1].rid
    assert len(samples[0].rid) == 32


def test_text_is_tokenised() -> None:
    assert parse({"text": "a bb ccc", "sampling_params": {"max_new_tokens": 1}})[0][0].token_ids == (1, 2, 3)
    samples, batched = parse({"text": ["a", "bb"], "sampling_params": {"max_new_tokens": 1}})
    assert batched
    assert [s.token_ids for s in samples] == [(1,), (2,)]


def test_a_prompt_must_leave_room_in_the_context() -> None:
    assert parse({"input_ids": [1] * 99, "sampling_params": {"max_new_tokens": 1}})
    with pytest.raises(BadRequest, match="longer than the model's context length"):
        parse({"input_ids": [1] * 100, "sampling_params": {"max_new_tokens": 0}})
    with pytest.raises(BadRequest, match="exceeds the model's maximum context length"):
        parse({"input_ids": [1] * 99, "sampling_params": {"max_new_tokens": 2}})


def test_a_token_outside_the_vocabulary_is_let_through_as_sglang_does() -> None:
    assert parse({"input_ids": [10**6], "sampling_params": {"max_new_tokens": 1}})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "JSON object"),
        ({}, "text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "not both"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [[1], []]}, "at least one token"),
        ({"input_ids": [1, "2"]}, "list of integers"),
        ({"input_ids": [[1], 2]}, "list of integers"),
        ({"input_ids": [True]}, "list of integers"),
        ({"text": []}, "list of strings"),
        ({"input_ids": [1], "rid": ["a"]}, "rid should be a string"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "mismatch"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate"),
        ({"input_ids": [[1], [2]], "extra_key": ["a"]}, "extra_key"),
        ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": {"temperature": 0.7}}, "greedily"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "stream": True}, "stream"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(body: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse(body, context_length=1000)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(BadRequest, match="input_ids instead"):
        parse_generate({"text": "a"}, context_length=1000, tokenize=None)
