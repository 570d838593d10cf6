"""Chats as submitted, brought to one form: OpenAI's `messages`, with text contents only."""

from __future__ import annotations

from typing import Any

from statetap.ports import DatasetRefused

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")
Message = dict[str, Any]


def from_openai(messages: Any, limit: int, line: int) -> list[Message]:
    """`messages` with every content as one string; other keys of a message stay, for the chat template.

    Raises:
        DatasetRefused: not a list of messages, an unknown role, or content that is missing or not text.
    """
    checked = []
    for index, message in enumerate(_listed(messages, "messages", limit, line)):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise DatasetRefused("a message is an object with role and content", line=line, field=where)
        role = message.get("role")
        if role not in ROLES:
            raise DatasetRefused(f"unknown role {role!r}; known: {', '.join(ROLES)}", line=line, field=f"{where}.role")
        checked.append(message | {"content": _text(message.get("content"), line, f"{where}.content")})
    return checked


def from_sharegpt(conversations: Any, limit: int, line: int) -> list[Message]:
    """ShareGPT's `[{from, value}]` as OpenAI messages. Raises as `from_openai`."""
    checked = []
    for index, turn in enumerate(_listed(conversations, "conversations", limit, line)):
        where = f"conversations[{index}]"
        if not isinstance(turn, dict):
            raise DatasetRefused("a turn is an object with from and value", line=line, field=where)
        speaker = turn.get("from")
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise DatasetRefused(f"unknown speaker {speaker!r}; known: {known}", line=line, field=f"{where}.from")
        checked.append({"role": role, "content": _text(turn.get("value"), line, f"{where}.value")})
    return checked


def _listed(value: Any, field: str, limit: int, line: int) -> list[Any]:
    if not isinstance(value, list):
        raise DatasetRefused("must be a list of messages", line=line, field=field)
    if not value:
        raise DatasetRefused("is empty; leave the sample out or give it a message", line=line, field=field)
    if len(value) > limit:
        raise DatasetRefused(
            f"has {len(value)} messages, at most {limit} are taken; cut the chat in pieces", line=line, field=field
        )
    return value


def _text(content: Any, line: int, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise DatasetRefused("the message has no content; give it text, which may be empty", line=line, field=where)
    if not isinstance(content, list):
        raise DatasetRefused(f"content must be text, not {type(content).__name__}", line=line, field=where)
    return "".join(_part(part, line, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, line: int, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        named = f"a part of type {kind!r}" if isinstance(kind, str) else "a part without a type"
        raise DatasetRefused(
            f"{named} cannot be taken: text only, no images, audio or video; give the text alone", line=line, field=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise DatasetRefused("a text part needs its text", line=line, field=f"{where}.text")
    return text
