from __future__ import annotations

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


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([reply("a")], "1 answers to a request of 2"),
        ([reply("b"), reply("a")], "for 'b'"),
        ([reply("a"), {"output_ids": [1]}], "no meta_info"),
        ([reply("a"), "text"], "no meta_info"),
        ([reply("a"), reply("b", prompt_tokens=None)], "lacks token counts"),
        ([reply("a"), reply("b") | {"output_ids": ["x"]}], "lacks token counts"),
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_refused(answers, reason):
    with pytest.raises(RequestRefused, match=reason) as caught:
        read_answers(answers, ["a", "b"])
    assert caught.value.status == 502


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
    with pytest.raises(RequestRefused, match=r"has statetap_dumps .* it must be lists of names") as caught:
        read_answers(reply("a", statetap_dumps=named), ["a"])
    assert caught.value.status == 502


@pytest.mark.parametrize(("finish", "status"), [({}, 503), ({"status_code": 500}, 500), ({"status_code": 200}, 503)])
def test_an_abort_is_a_refusal(finish, status):
    aborted = reply("a", finish_reason={"type": "abort", "message": "Abort in waiting queue"} | finish)
    with pytest.raises(RequestRefused, match="Abort in waiting queue") as caught:
        read_answers(aborted, ["a"])
    assert caught.value.status == status


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
