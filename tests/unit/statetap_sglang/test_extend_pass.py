from __future__ import annotations

import pytest
from statetap_sglang.extend_pass import ExtendPass, RequestRows


def request(rid: str, prefix: int, extend: int, prompt: int) -> RequestRows:
    return RequestRows(rid=rid, prefix_len=prefix, extend_len=extend, prompt_len=prompt)


def published(*requests: RequestRows) -> list[tuple[str, int, int]]:
    extend = ExtendPass(forward_pass=1, requests=requests, start_ns=0)
    return [(one.request.rid, one.start, one.stop) for one in extend.prompt_rows()]


def test_rows_are_cut_by_extend_lengths() -> None:
    assert published(request("a", 0, 30, 30), request("b", 0, 25, 25), request("c", 0, 9, 40)) == [
        ("a", 0, 30),
        ("b", 30, 55),
        ("c", 55, 64),
    ]


@pytest.mark.parametrize(
    ("prefix", "extend", "prompt", "is_prompt"),
    [
        (0, 1, 1, True),
        (99, 1, 100, True),
        (100, 1, 100, False),  # the first decode row, in a mixed pass
        (64, 64, 128, True),
        (64, 65, 128, False),  # a retracted request extends over its own output
        (0, 0, 10, False),
    ],
)
def test_rows_belong_to_the_prompt_iff_they_end_within_it(prefix: int, extend: int, prompt: int, is_prompt: bool) -> None:
    assert bool(published(request("a", prefix, extend, prompt))) == is_prompt


def test_rows_after_decode_rows_keep_their_place() -> None:
    assert published(request("decoding", 10, 1, 10), request("prompt", 0, 5, 5)) == [("prompt", 1, 6)]
    assert ExtendPass(forward_pass=1, requests=(request("a", 10, 1, 10), request("b", 0, 5, 5)), start_ns=0).rows == 6
