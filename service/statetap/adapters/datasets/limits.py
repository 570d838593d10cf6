"""What a dataset may cost before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """Bounds of one dataset. A gzipped body is measured unpacked, and its ratio once `ratio_from_bytes` came out of it."""

    line_bytes: int = 64 * MIB
    body_bytes: int = 256 * GIB
    samples: int = 20_000_000
    messages: int = 2_000
    """Of one chat: masks from message prefixes render it once or more per assistant message."""
    batch_cpu_seconds: float = 300.0
    """Of a tokenising process, for about a MiB of text or one line. Tokenizers take the square of a word's length."""
    gzip_ratio: int = 200
    ratio_from_bytes: int = 16 * MIB


DEFAULT_LIMITS = IntakeLimits()
