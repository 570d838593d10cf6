from __future__ import annotations

import re

import pytest
from statetap.adapters.inference.answers import complaint, read_answers, read_context_length
from statetap.ports import GenerateAnswer, RequestRefused


def reply(rid: str, **changes: object) -> dict[str, object]:
    meta = {"id": rid, "prompt_tokens": 3, "cached_tokens": 1, "finish_reason": {"type": "length"}}
    return {"output_ids": [5], "meta_info": meta | changes}


def test_a_lone_answer_is_an_object():
    assert read_answers(reply("a"), ["a"]) == [GenerateAnswer("a", 3, 1, 5)]


@pytest.mark.parametrize("output", [[], None])
def test_without_output_the_next_token_is_unknown(output):
    assert read_answers(reply("a") | {"output_ids": output}, ["a"])[0].next_token == -1


def test_answers_belong_to_the_samples_whose_rids_they_bear_wherever_they_stand():
    first, second, third = read_answers([reply("c"), reply("a"), reply("b")], ["a", "b", "c"])
    assert [outcome.rid for outcome in (first, second, third)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([reply("a")], "0 answers to b; the reply answers 'a'"),
        ([reply("x"), reply("a")], "0 answers to b; the reply answers 'x', 'a'"),
        ([reply("b"), reply("a"), reply("b")], "2 answers to b"),
        ([reply("a"), {"output_ids": [1]}], "0 answers to b; the reply answers 'a', None"),
        ([reply("a"), "text"], "0 answers to b"),
        ([reply("a"), reply("b", prompt_tokens=None)], "lacks token counts"),
        ([reply("a"), reply("b") | {"output_ids": ["x"]}], "lacks token counts"),
        ([reply("a"), reply("b", statetap_dumps=1)], "it must be lists of names"),
        ([reply("a"), reply("b", finish_reason={"type": "abort"})], "the worker aborted b"),
    ],
)
def test_a_sample_without_a_good_answer_is_refused_and_its_neighbour_is_not(answers, reason):
    neighbour, refused = read_answers(answers, ["a", "b"])
    assert neighbour == GenerateAnswer("a", 3, 1, 5)
    assert isinstance(refused, RequestRefused)
    assert refused.status in (502, 503)
    assert reason in refused.message


@pytest.mark.parametrize("answer", [{}, [], "text", None, reply("b")])
def test_a_lone_sample_without_its_answer_is_refused(answer):
    (refused,) = read_answers(answer, ["a"])
    assert isinstance(refused, RequestRefused)
    assert refused.status == 502


@pytest.mark.parametrize(
    ("named", "known"),
    [
        ({}, None),
        ({"statetap_dumps": None}, None),
        ({"statetap_dumps": []}, None),
        ({"statetap_dumps": [[]]}, frozenset()),
        ({"statetap_dumps": [["b-0/req_1", "b-0/req_2"]]}, frozenset({"b-0/req_1", "b-0/req_2"})),
        ({"statetap_dumps": [["b-0/req_1"], ["b-0/req_1", "b-0/req_2"]]}, frozenset({"b-0/req_1", "b-0/req_2"})),
    ],
)
def test_the_dumps_that_an_answer_names_are_those_of_its_last_token(named, known):
    assert read_answers(reply("a", **named), ["a"])[0].dumps == known


@pytest.mark.parametrize("named", ["b-0/req_1", {"a": 1}, 1, ["b-0/req_1"], [None], [[1]], [["b-0/req_1", None]]])
def test_names_of_another_form_are_refused(named):
    (refused,) = read_answers(reply("a", statetap_dumps=named), ["a"])
    assert isinstance(refused, RequestRefused)
    assert refused.status == 502
    assert re.search(r"has statetap_dumps .* it must be lists of names", refused.message)


@pytest.mark.parametrize(("finish", "status"), [({}, 503), ({"status_code": 500}, 500), ({"status_code": 200}, 503)])
def test_an_abort_is_a_refusal(finish, status):
    aborted = reply("a", finish_reason={"type": "abort", "message": "Abort in waiting queue"} | finish)
    (refused,) = read_answers(aborted, ["a"])
    assert isinstance(refused, RequestRefused)
    assert refused.status == status
    assert "Abort in waiting queue" in refused.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"object": "error", "message": "aborted", "type": "503"}', "aborted"),
        (b'{"error": "no such field"}', "no such field"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", ""),
    ],
)
def test_the_message_of_an_error_is_found(body, message):
    assert complaint(body) == message


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        ({}, None),
        ({"context_length": None, "max_req_input_len": 4090}, 4089),
        ({"context_length": 2048, "max_req_input_len": 4090}, 2048),
        ({"context_length": 2048}, 2048),
    ],
)
def test_the_longest_prompt_is_the_tightest_limit(info, limit):
    assert read_context_length(info) == limit
