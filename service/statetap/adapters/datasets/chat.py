"""A chat's token ids and its mask: 1 for what the assistant says, its end-of-turn token included; 0 for everything else.

Where the chat template has generation marks, its author decided. Elsewhere the mask comes from rendering prefixes of the chat:

- A turn's text begins where the rendering of the messages before it, with the generation prompt, ends. Where that is no
  beginning of the whole (or adds nothing), it begins where two renderings part that differ only in the turn's first character.
- It ends where the rendering up to and including it ends, less white space after its last special token: that is the template's.
- A token is the assistant's if it shares a character with such a turn, so that a merge across a border counts as said.

A chat is refused where a prefix of it does not render to a prefix of the whole: the template drops or rewrites earlier turns.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from statetap.adapters.datasets.messages import Message
from statetap.adapters.datasets.samples import Chat
from statetap.adapters.datasets.tokenizer import Binding, chat_template
from statetap.ports import DatasetRefused

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
RENDERED_CHARS = 1 << 28
"""What masking a chat may take: its text is rendered a few times for every turn of the assistant, in all the square of it."""
CHARS_A_MESSAGE = 512
"""What a message costs beside its text, as characters."""
WAYS_OUT = "send input_ids with a loss_mask, use a template with {% generation %} marks, or split the chat into single turns"


class ChatRefused(Exception):
    """Why a chat cannot be rendered or masked; the caller knows the line."""


def encode_chat(binding: Binding, chat: Chat, line: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Token ids int32 `[n]` and unshifted mask uint8 `[n]`.

    Raises:
        DatasetRefused: no tokenizer or chat template, a tokenizer without offsets, or a chat that the template does not take.
    """
    tokenizer = binding.require_tokenizer(line, chat.field)
    template = chat_template(tokenizer)
    if not template:
        raise DatasetRefused(
            f"the tokenizer of model {binding.source.model!r} has no chat template; send text or input_ids",
            line=line,
            field=chat.field,
        )
    if not tokenizer.is_fast:
        raise DatasetRefused(
            f"the tokenizer of model {binding.source.model!r} is no fast one and does not tell where its tokens come from, so "
            "assistant turns cannot be found; send input_ids with a loss_mask",
            line=line,
            field=chat.field,
        )
    try:
        if GENERATION_MARK.search(template):
            return _encode_marked(tokenizer, chat.messages)
        return _encode_by_prefixes(tokenizer, chat.messages, binding.special_ids)
    except ChatRefused as refusal:
        raise DatasetRefused(str(refusal), line=line, field=chat.field) from refusal


def _encode_marked(tokenizer: Any, messages: list[Message]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    encoded = _apply(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return np.array(encoded["input_ids"], np.int32), np.array(encoded["assistant_masks"], np.uint8)


def _encode_by_prefixes(
    tokenizer: Any, messages: list[Message], special_ids: frozenset[int]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    whole = _render(tokenizer, messages)
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns * (len(whole) + CHARS_A_MESSAGE * len(messages)) > RENDERED_CHARS:
        raise ChatRefused(
            f"the chat has {turns} turns of the assistant in {len(messages)} messages and {len(whole)} characters, too much to "
            f"find each turn by rendering the chat up to it; {WAYS_OUT}"
        )
    spans = [_turn(tokenizer, messages, index, whole) for index, message in enumerate(messages) if message["role"] == "assistant"]
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoded["input_ids"], np.int32)
    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    special = np.isin(ids, list(special_ids))
    mask = np.zeros(len(ids), np.uint8)
    for start, end in spans:
        spoken = (offsets[:, 1] > start) & (offsets[:, 0] < _without_trailing_space(whole, (start, end), offsets, special))
        mask[spoken] = 1
    return ids, mask


def _turn(tokenizer: Any, messages: list[Message], index: int, whole: str) -> Span:
    """The characters of `whole` that the assistant's message `index` takes, from the end of its header to the next message's."""
    upto = _render(tokenizer, messages[: index + 1])
    if not whole.startswith(upto):
        raise ChatRefused(
            f"the chat template renders the chat up to message {index} differently when more follows (it drops or rewrites "
            f"earlier turns), so what the assistant said cannot be told; {WAYS_OUT}"
        )
    start = _header_end(tokenizer, messages, index, upto)
    if start is None:
        raise ChatRefused(f"the chat template gives message {index} a header that depends on its content; {WAYS_OUT}")
    return start, len(upto)


def _header_end(tokenizer: Any, messages: list[Message], index: int, upto: str) -> int | None:
    """Where message `index`, the last in `upto`, begins to speak."""
    before = messages[:index]
    if before:
        prompt = _render(tokenizer, before, add_generation_prompt=True)
        if upto.startswith(prompt) and prompt != _render(tokenizer, before):
            return len(prompt)
    one, other = (_render(tokenizer, [*before, messages[index] | {"content": content}]) for content in ("a", "b"))
    header = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    return header if header is not None and upto.startswith(one[:header]) else None


def _without_trailing_space(whole: str, span: Span, offsets: NDArray[np.int64], special: NDArray[np.bool_]) -> int:
    """The end of the turn's last special token where only white space follows it, else the turn's end."""
    start, end = span
    ends = offsets[special & (offsets[:, 0] >= start) & (offsets[:, 1] <= end), 1]
    if len(ends) and not whole[ends[-1] : end].strip():
        return int(ends[-1])
    return end


def _render(tokenizer: Any, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    rendered: str = _apply(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return rendered


def _apply(tokenizer: Any, messages: list[Message], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise ChatRefused(f"the chat template does not take this chat: {error}") from error
