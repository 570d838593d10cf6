"""The tokenizer that a dataset is bound to, and the vocabulary that its ids must stay in. Loaded in pool processes only.

transformers is imported on first use: it takes seconds, and the service's own process never needs it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from statetap.ports import DatasetRefused

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a model's tokenizer comes from: `path` is a directory, a GGUF file, or a name on the Hugging Face hub.

    `trust_remote_code` lets the model's own Python code run here; leave it off unless that code is known.
    """

    model: str
    path: str
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """`vocab_size` bounds the ids; `chat_template_sha256` is over the template's UTF-8 text, "" if there is none."""

    vocab_size: int
    chat_template_sha256: str


@dataclass(frozen=True, slots=True)
class Binding:
    """A loaded tokenizer. `tokenizer` is None, and `missing` says why, where a model has a vocabulary size but no tokenizer."""

    source: TokenizerSource
    tokenizer: Any | None
    missing: str
    special_ids: frozenset[int]
    facts: TokenizerFacts

    def require_tokenizer(self, line: int, field: str) -> Any:
        if self.tokenizer is None:
            raise DatasetRefused(
                f"model {self.source.model!r} has no tokenizer ({self.missing}); send input_ids, or choose another model",
                line=line,
                field=field,
            )
        return self.tokenizer


@lru_cache(maxsize=4)
def bind(source: TokenizerSource) -> Binding:
    """Load what `source` names, once a process.

    Raises:
        DatasetRefused: neither a tokenizer nor a vocabulary size is to be had.
    """
    location, options = _locate(source)
    tokenizer, missing = _load_tokenizer(location, options)
    vocab_size = _config_vocab_size(location, options) or (len(tokenizer) if tokenizer is not None else None)
    if vocab_size is None:
        raise DatasetRefused(
            f"the tokenizer of model {source.model!r} cannot be loaded from {source.path!r}: {missing}; "
            "check the configured path, and that its files are on this machine"
        )
    template = chat_template(tokenizer)
    digest = hashlib.sha256(template.encode()).hexdigest() if template else ""
    return Binding(source, tokenizer, missing, _special_ids(tokenizer), TokenizerFacts(vocab_size, digest))


def describe(source: TokenizerSource) -> TokenizerFacts:
    """`bind`, for a caller in another process."""
    return bind(source).facts


def chat_template(tokenizer: Any | None) -> str:
    """The template's text, "" if there is none (or several without a default)."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def _locate(source: TokenizerSource) -> tuple[str, dict[str, Any]]:
    """What to hand to transformers: a directory or name, and the options that go with it."""
    options: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    path = Path(source.path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), options | {"gguf_file": path.name}
    if not path.is_dir():
        return source.path, options
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        gguf = sorted(path.glob("*.gguf"))
        if len(gguf) > 1:
            raise DatasetRefused(
                f"{source.path!r}, the tokenizer of model {source.model!r}, holds {len(gguf)} GGUF files; "
                "configure one by its file name"
            )
        if gguf:
            options["gguf_file"] = gguf[0].name
    return str(path), options


def _load_tokenizer(location: str, options: dict[str, Any]) -> tuple[Any | None, str]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location, **options), ""
    except Exception as error:  # noqa: BLE001 - transformers, the hub's client and a model's own code raise anything; the text is what counts
        return None, _first_line(error)


def _config_vocab_size(location: str, options: dict[str, Any]) -> int | None:
    """`vocab_size` of the model's config, which bounds the embedding; a tokenizer may be smaller, or larger than the model."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(location, **options)
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _special_ids(tokenizer: Any | None) -> frozenset[int]:
    """Ids of special tokens; an end-of-turn token need not be one of the named ones (`all_special_ids`)."""
    if tokenizer is None:
        return frozenset()
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added if token.special}


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__
