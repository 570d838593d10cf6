"""What one forward pass holds, and which of its rows belong to prompts.

A pass's rows are those of its requests, one after another. A request's rows are `[prefix_len, prefix_len + extend_len)` of its
text, and belong to its prompt iff they end within it: decode rows, alone or mixed into an extend pass, lie beyond. Rows are
cut by the requests' extend lengths, never by a tensor's shape: padding comes after the last request.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """One request's share of a pass. `obstacle` says why its states are not those of its tokens alone, None if they are."""

    rid: str
    prefix_len: int
    extend_len: int
    prompt_len: int
    retraction_count: int = 0
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows `[start, stop)` of a pass: part of one request's prompt."""

    request: RequestRows
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendPass:
    """One extend pass, mixed or not. `forward_pass` counts passes; `start_ns` is monotonic.

    `padded`: the model's states may have more rows than the requests have.
    """

    forward_pass: int
    requests: tuple[RequestRows, ...]
    start_ns: int
    padded: bool = False

    @property
    def rows(self) -> int:
        return sum(request.extend_len for request in self.requests)

    def prompt_rows(self) -> tuple[PromptRows, ...]:
        """The rows to publish, in the pass's order."""
        found = []
        start = 0
        for request in self.requests:
            stop = start + request.extend_len
            if request.extend_len and request.prefix_len + request.extend_len <= request.prompt_len:
                found.append(PromptRows(request, start, stop))
            start = stop
        return tuple(found)
