"""What a reader gives, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from statetap_client.layout import Status

Array = TypeVar("Array")


class StoreReadError(Exception):
    """The store cannot be read as asked; the message says why."""


class NotAStore(StoreReadError):
    """There is no Statetap store at that path, or it has a format that this version does not read."""


class SampleNotStored(StoreReadError):
    """The sample has no hidden states; `status` says what became of it."""

    def __init__(self, index: int, id: str, status: Status) -> None:  # noqa: A002 (the contract's word)
        super().__init__(
            f"sample {index} (id {id!r}) is {status.name.lower()}, not stored: it has no hidden states; "
            "go by `reader.stored` or `reader.statuses`"
        )
        self.index = index
        self.id = id
        self.status = status


class DigestMismatch(StoreReadError):
    """A sample's bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class Sample(Generic[Array]):
    """One stored sample of T tokens, or T rows of it: `input_ids` int32 `[T]`, `loss_mask` uint8 `[T]`, hidden states in the
    store's dtype.

    `aux_hidden_states` is `[T, K, H]`, both final states are `[T, H]`; None where the store does not have them.
    `next_token` is what the worker itself answered at temperature 0, -1 if unknown.
    """

    index: int
    id: str
    next_token: int
    input_ids: Array
    loss_mask: Array
    aux_hidden_states: Array | None = None
    last_hidden_states: Array | None = None
    last_hidden_states_prenorm: Array | None = None
