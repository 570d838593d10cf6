"""Reads what an SGLang server says: answers of `/generate`, its errors, and its limits. Pure; shapes as of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from statetap.ports import GenerateAnswer, Outcome, RequestRefused

MALFORMED = 502
ABORTED = 503
COMPLAINT_CHARS = 500
DUMPS_KEY = "statetap_dumps"


def read_answers(reply: Any, rids: Sequence[str]) -> list[Outcome]:
    """What came of the samples `rids`, in their order: the reply is a JSON object for one sample, a list of them for several.

    An answer belongs to the sample whose rid it bears, wherever it stands. A sample that the worker aborted is refused with 503
    (or the status that the worker gives); one without exactly one readable answer is refused with 502.
    """
    named: dict[str, list[tuple[Any, dict[str, Any]]]] = {rid: [] for rid in rids}
    seen = []
    for one in reply if isinstance(reply, list) else [reply]:
        meta = meta if isinstance(meta := _member(one, "meta_info"), dict) else {}
        seen.append(name := meta.get("id"))
        if isinstance(name, str) and name in named:
            named[name].append((one, meta))
    return [_outcome(named[rid], rid, seen) for rid in rids]


def _outcome(named: Sequence[tuple[Any, dict[str, Any]]], rid: str, seen: Sequence[Any]) -> Outcome:
    try:
        if len(named) != 1:
            answered = ", ".join(map(repr, seen[:20]))
            raise RequestRefused(MALFORMED, f"{len(named)} answers to {rid}; the reply answers {answered:.200}")
        return _read_answer(*named[0], rid)
    except RequestRefused as refused:
        return refused


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _read_answer(reply: Any, meta: dict[str, Any], rid: str) -> GenerateAnswer:
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        status = finish.get("status_code")
        raise RequestRefused(
            status if isinstance(status, int) and 400 <= status < 600 else ABORTED,
            f"the worker aborted {rid}: {finish.get('message') or 'no reason given'}",
        )
    # `output_ids` is there with and without a tokenizer (BatchStrOutput and BatchTokenIDOutput alike).
    output = reply.get("output_ids") or [-1]
    try:
        tokens = int(meta["prompt_tokens"]), int(meta["cached_tokens"]), int(output[0])
    except (KeyError, TypeError, ValueError) as error:
        raise RequestRefused(MALFORMED, f"the answer to {rid} lacks token counts: {error!r}") from error
    return GenerateAnswer(rid, *tokens, _read_dumps(meta.get(DUMPS_KEY), rid))


def _read_dumps(values: Any, rid: str) -> frozenset[str] | None:
    """The dumps that the plugin names: SGLang gives `customized_info` as one value for each output token, the last one whole.

    None where there is no such key, or no output token to hang it on.
    """
    if values is None or values == []:
        return None
    names = values[-1] if isinstance(values, list) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestRefused(MALFORMED, f"the answer to {rid} has {DUMPS_KEY} {values!r:.100}; it must be lists of names")
    return frozenset(names)


def complaint(content: bytes) -> str:
    """The message of an error body: SGLang says `{"error": {"message"}}`, `{"message"}` or `{"error"}`; else the text, cut."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content[:COMPLAINT_CHARS].decode(errors="replace").strip()
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if body.get(key)), "")
    return str(body)[:COMPLAINT_CHARS]


def read_context_length(server_info: dict[str, Any]) -> int | None:
    """The longest prompt the server takes, in tokens.

    `context_length` is null unless it was given on the command line. `max_req_input_len` already counts the KV pool in, and a
    prompt must be shorter than it (`srt/managers/utils.py`, `validate_input_length`).
    """
    limits = []
    if isinstance(context_length := server_info.get("context_length"), int):
        limits.append(context_length)
    if isinstance(input_limit := server_info.get("max_req_input_len"), int):
        limits.append(input_limit - 1)
    return min(limits, default=None)
