"""The bodies of `/generate`, as SGLang reads them (`managers/io_struct.py`, 0.5.23): one sample or several."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# SGLang's default; sampling parameters that change nothing at temperature 0, or only the text, are taken and ignored.
_DEFAULT_MAX_NEW_TOKENS = 128
_HONOURED = frozenset({"max_new_tokens", "temperature", "ignore_eos"})
_WITHOUT_EFFECT = frozenset(
    {
        "top_p",
        "top_k",
        "min_p",
        "sampling_seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "custom_params",
    }
)


class BadRequest(ValueError):
    """A request that SGLang would answer with 400, or that asks for what this worker cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample of a request, ready to run. `extra_key` keeps it apart from prefixes cached under others."""

    rid: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    extra_key: str | None = None
    ignore_eos: bool = False


def parse_generate(
    body: Any, *, context_length: int, tokenize: Callable[[str], list[int]] | None
) -> tuple[list[SampleRequest], bool]:
    """The samples of a `/generate` body, and whether they came as a batch (then the answer is a list, too).

    Token ids are not held against the vocabulary: SGLang does not, and dies of it.

    Raises:
        BadRequest: with the message for the client.
    """
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    if body.get("stream"):
        raise BadRequest("The embedded worker does not stream: leave `stream` out.")
    prompts, batched = _prompts(body, tokenize)
    count = len(prompts)
    rids = _rids(body.get("rid"), count, batched=batched)
    extra_keys = _spread(body.get("extra_key"), count, "extra_key")
    sampling = [_sampling(params) for params in _spread(body.get("sampling_params"), count, "sampling_params")]
    samples = [
        SampleRequest(rid=rid, token_ids=ids, extra_key=key, max_new_tokens=new, ignore_eos=ignore_eos)
        for rid, ids, key, (new, ignore_eos) in zip(rids, prompts, extra_keys, sampling, strict=True)
    ]
    for sample in samples:
        _check_lengths(sample, context_length)
    return samples, batched


def _prompts(body: dict[str, Any], tokenize: Callable[[str], list[int]] | None) -> tuple[list[tuple[int, ...]], bool]:
    given, text = body.get("input_ids"), body.get("text")
    if (given is None) == (text is None):
        raise BadRequest("Either text or input_ids should be provided, and not both.")
    if text is not None:
        if tokenize is None:
            raise BadRequest("The server runs without a tokenizer: send input_ids instead of text.")
        batched = isinstance(text, list)
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a list of strings.")
        return [tuple(tokenize(t)) for t in texts], batched
    if not isinstance(given, list) or not given:
        raise BadRequest("input_ids must be a list of token ids, or a list of such lists, and not empty.")
    batched = isinstance(given[0], list)
    prompts = given if batched else [given]
    if not all(isinstance(p, list) and all(type(i) is int for i in p) for p in prompts):
        raise BadRequest("input_ids must be a list of integers, or a list of such lists.")
    return [tuple(p) for p in prompts], batched


def _rids(given: Any, count: int, *, batched: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str):
        return [f"{given}_{i}" for i in range(count)] if batched else [given]
    if not batched or not isinstance(given, list) or not all(isinstance(rid, str) for rid in given):
        raise BadRequest("The rid should be a string or, for a batch, a list of strings.")
    if len(given) != count:
        raise BadRequest("The specified rids length mismatch with the batch_size for batch processing.")
    duplicates = sorted({rid for rid in given if given.count(rid) > 1})
    if duplicates:
        raise BadRequest(f"Duplicate request IDs detected within the request: {duplicates}")
    return given


def _spread(given: Any, count: int, name: str) -> Sequence[Any]:
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise BadRequest(f"The length of {name} ({len(given)}) should be equal to the batch size ({count}).")
    return given


def _sampling(params: Any) -> tuple[int, bool]:
    params = params or {}
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object, or a list of objects.")
    unknown = sorted(set(params) - _HONOURED - _WITHOUT_EFFECT)
    if unknown:
        raise BadRequest(f"The embedded worker does not know the sampling parameters {unknown}; it decodes greedily.")
    if params.get("temperature", 0) != 0:
        raise BadRequest("The embedded worker decodes greedily: set temperature to 0.")
    max_new_tokens = params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    return max_new_tokens, bool(params.get("ignore_eos", False))


def _check_lengths(sample: SampleRequest, context_length: int) -> None:
    length = len(sample.token_ids)
    if not length:
        raise BadRequest("The input must hold at least one token.")
    # A prompt that fills the context leaves no room for an answer: SGLang refuses it even at max_new_tokens 0.
    if length >= context_length:
        raise BadRequest(f"The input ({length} tokens) is longer than the model's context length ({context_length} tokens).")
    total = length + sample.max_new_tokens
    if total > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. You requested a total "
            f"of {total} tokens: {length} tokens from the input messages and {sample.max_new_tokens} tokens for the completion."
        )
