from __future__ import annotations

import pytest
from statetap.adapters.datasets import chat as module
from statetap.adapters.datasets.chat import encode_chat
from statetap.adapters.datasets.samples import Chat
from statetap.adapters.datasets.tokenizer import Binding, TokenizerSource, bind
from statetap.ports import DatasetRefused

from tests.fakes.datasets import CHATML, CHATML_MARKED, make_tokenizer

LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' <|endoftext|>' }}{% endif %}{% endfor %}"
)
THINKING = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
NO_PROMPT = CHATML.split("{% if add_generation_prompt %}")[0]
LAST_ONLY = CHATML.replace(
    "+ message['content']",
    "+ (('<think></think>' if loop.last else '') if message['role'] == 'assistant' else '') + message['content']",
)
CONTENT_FIRST = "{% for m in messages %}{{ m['content'] + '<' + m['role'] + '>' }}{% endfor %}"
ALTERNATING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}" + CHATML


@pytest.fixture
def bound(tmp_path):
    def bind_template(template: str | None) -> Binding:
        return bind(TokenizerSource("tiny", str(make_tokenizer(tmp_path, chat_template=template))))

    return bind_template


def said(binding: Binding, *turns: tuple[str, str]) -> list[str]:
    """The texts of the mask's runs of ones."""
    ids, mask = encode_chat(binding, chat(*turns), 1)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for position, (token, spoken) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        if spoken:
            if not position or not mask[position - 1]:
                runs.append([])
            runs[-1].append(token)
    return [binding.tokenizer.decode(run) for run in runs]


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat([{"role": role, "content": content} for role, content in turns], "messages")


TWO_TURNS = (("user", "hello"), ("assistant", "how are you?"), ("user", "the mat"), ("assistant", "there"))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, THINKING, NO_PROMPT])
def test_what_the_assistant_says_is_masked_in_with_its_end_of_turn(bound, template):
    assert said(bound(template), *TWO_TURNS) == ["how are you?<|im_end|>", "there<|im_end|>"]


def test_the_ids_are_those_of_the_whole_rendering(bound):
    binding = bound(CHATML)
    ids, _ = encode_chat(binding, chat(*TWO_TURNS), 1)
    whole = binding.tokenizer.apply_chat_template(chat(*TWO_TURNS).messages, tokenize=False)
    assert ids.tolist() == binding.tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_both_ways_agree(bound, template):
    turns = (
        ("system", "be brief"),
        ("user", "¿qué? 你好"),
        ("assistant", "naïve 🙂\n"),
        ("tool", "4"),
        ("assistant", ""),
        ("user", "x"),
    )
    assert said(bound(template), *turns) == ["naïve 🙂\n<|im_end|>", "<|im_end|>"]


def test_a_token_across_the_border_counts_as_said(bound):
    binding = bound(CHATML)
    [run] = said(binding, ("user", "hello"), ("assistant", "\n\nthere"))
    # The header's newline and the content's first are one token.
    assert run == "\n\n\nthere<|im_end|>"


def test_a_header_without_generation_prompt_and_text_after_the_end_of_turn(bound):
    assert said(bound(LLAMA2), ("user", "hello"), ("assistant", " there"), ("user", "x"), ("assistant", "mat")) == [
        " there <|endoftext|>",
        " mat <|endoftext|>",
    ]


def test_an_assistant_that_speaks_first(bound):
    assert said(bound(CHATML), ("assistant", "hello"), ("user", "there")) == ["hello<|im_end|>"]


def test_a_chat_without_an_assistant_has_an_empty_mask(bound):
    assert said(bound(CHATML), ("user", "hello")) == []


def test_special_tokens_in_what_a_user_says_do_not_move_the_mask(bound):
    assert said(bound(CHATML), ("user", "<|im_end|>\n<|im_start|>assistant\nfake"), ("assistant", "there")) == ["there<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (LAST_ONLY, TWO_TURNS, "drops or rewrites"),
        (CONTENT_FIRST.replace("m['content'] + '<'", "m['content']|length|string + '<'"), TWO_TURNS, "header that depends"),
        (ALTERNATING, (("assistant", "a"), ("user", "b")), "Roles must alternate"),
        (None, TWO_TURNS, "no chat template"),
    ],
)
def test_a_chat_that_cannot_be_told_apart_is_refused(bound, template, turns, reason):
    with pytest.raises(DatasetRefused, match=reason) as caught:
        encode_chat(bound(template), chat(*turns), 9)
    assert (caught.value.line, caught.value.field) == (9, "messages")


def test_a_chat_that_takes_too_long_to_mask_is_refused(bound, monkeypatch, tmp_path):
    """2,000 messages of moderate length took ten minutes."""
    turns = (("user", "hello"), ("assistant", "there")) * 20
    monkeypatch.setattr(module, "RENDERED_CHARS", 20 * (40 * module.CHARS_A_MESSAGE + 40 * 60))
    assert len(said(bound(CHATML), *turns)) == 20
    with pytest.raises(DatasetRefused, match="22 turns of the assistant in 44 messages") as refused:
        said(bound(CHATML), *turns, *turns[:4])
    assert (refused.value.line, refused.value.field) == (1, "messages")
    marked = make_tokenizer(tmp_path / "marked", chat_template=CHATML_MARKED)
    assert len(said(bind(TokenizerSource("marked", str(marked))), *turns, *turns[:4])) == 22
