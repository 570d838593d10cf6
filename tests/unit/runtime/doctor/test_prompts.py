"""Prompts: inside every vocabulary, and placed so that one of them is split."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from statetap.runtime.doctor.prompts import MOST_TOKENS, ROOM_TO_ANSWER, Room, fillers, random_prompt


@given(vocab_size=st.integers(1, 300_000), seed=st.integers(0, 100))
def test_ids_are_inside_the_vocabulary(vocab_size, seed):
    prompt = random_prompt(np.random.default_rng(seed), 32, vocab_size)
    assert prompt.dtype == np.int32
    assert 0 <= prompt.min() <= prompt.max() < vocab_size


def passes_of_last(lengths, prompt_length, chunk, page):
    """The rows of the last prompt in each pass, as SGLang 0.5.23 fills a chunk: a prompt that does not fit is cut at a page."""
    parts, room = [], chunk
    for index, length in enumerate([*lengths, prompt_length]):
        left = length
        while left:
            taken = left if left <= room else room // page * page
            if taken == 0:
                room = chunk
                continue
            if index == len(lengths):
                parts.append(taken)
            left -= taken
            room -= -(-taken // page) * page
            if room <= 0:
                room = chunk
    return parts


@given(
    pages=st.integers(1, 300),
    page=st.sampled_from([1, 2, 16, 64]),
    context=st.one_of(st.none(), st.integers(80, 40_000)),
    data=st.data(),
)
def test_the_fillers_split_the_prompt_or_say_why_not(pages, page, context, data):
    chunk = pages * page
    room = Room(chunk=chunk, context=context, budget=10**9)
    if not room.prompt_tokens:
        return
    prompt_length = data.draw(st.integers(8, room.prompt_tokens))
    lengths = fillers(room, prompt_length, page)
    if isinstance(lengths, str):
        assert page >= prompt_length or chunk + prompt_length > MOST_TOKENS or (context or 10**9) - ROOM_TO_ANSWER < page
        return
    assert all(0 < length <= (context or 10**9) - ROOM_TO_ANSWER for length in lengths)
    parts = passes_of_last(lengths, prompt_length, chunk, page)
    assert sum(parts) == prompt_length
    assert len(parts) > 1


def test_nothing_is_split_where_prompts_are_never_split():
    assert fillers(Room(chunk=None, context=4096, budget=10**6), 128, 1) == "prompts are never split"


def test_what_does_not_fit_the_budget_or_the_pool_is_not_tried():
    assert "there is room for 256" in fillers(Room(chunk=512, context=4096, budget=1024), 128, 1)
    assert "there is room for 400" in fillers(Room(chunk=512, context=4096, budget=10**6, pool=400), 128, 1)


def test_a_prompt_leaves_room_for_its_answer_and_for_other_dumps():
    assert Room(chunk=None, context=4096, budget=10**6).prompt_tokens == 128
    assert Room(chunk=64, context=4096, budget=10**6).prompt_tokens == 64
    assert Room(chunk=64, context=40, budget=10**6).prompt_tokens == 32
    assert Room(chunk=64, context=4096, budget=100).prompt_tokens == 25
    assert Room(chunk=64, context=4096, budget=20).prompt_tokens == 0
