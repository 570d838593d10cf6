"""The objects of a store at an object store. Each is one PUT: there whole or not at all, and durable once that is answered.

A shard's object is made by a PUT that refuses to replace (`If-None-Match: *`). S3 takes at most 5 GiB in one PUT, and obstore
0.12 has no conditional multipart upload (its `put` sends in one piece whatever it is to create), so an object is in memory as a
whole while it is sent; obstore sends it from there, without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import obstore
import xxhash
import zarr.storage
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from statetap_client import layout
from statetap_client.object_stores import connect, first_line

from statetap.adapters.store.object_files import WINDOW_BYTES
from statetap.adapters.store.sent_object import SentObject
from statetap.core.object_urls import parents
from statetap.ports import StoreError

if TYPE_CHECKING:
    from statetap_client.object_stores import RemoteStore

REQUEST_SECONDS = 60
# A request that moves a large object may take as long as it does at this pace.
SLOWEST_BYTES_PER_SECOND = 8 << 20


class RemoteObjects:
    """Objects are below `url`.

    Raises:
        ValueError: it cannot be connected to from here.
    """

    largest_bytes = 5 << 30

    def __init__(self, url: str) -> None:
        self._url = url
        self._connected = lru_cache(maxsize=None)(lambda seconds: connect(url, request_seconds=seconds))
        self._store = self._client(0)

    def __str__(self) -> str:
        return self._url

    @contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as e:
            raise StoreError(f"{doing} {self} failed: {first_line(e)}") from e

    def is_vacant(self) -> bool:
        """Raises StoreError where it lies inside another store."""
        if self.exists(layout.METADATA_NAME) or next(iter(obstore.list(self._store, chunk_size=1)), None):
            return False
        for parent in parents(self._url):
            # Whatever this machine may not look at is none of its stores.
            with suppress(PermissionDeniedError):
                if _exists(connect(parent, request_seconds=REQUEST_SECONDS), layout.METADATA_NAME):
                    raise StoreError(f"{self} lies inside the store {parent}: put it beside it")
        return True

    def exists(self, key: str) -> bool:
        return _exists(self._store, key)

    def read(self, key: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            return None

    def replace(self, key: str, data: bytes) -> None:
        obstore.put(self._client(len(data)), key, data, use_multipart=False)

    def settle(self, key: str) -> None:
        """An object was durable when its PUT was answered."""

    def zarr_store(self) -> zarr.storage.ObjectStore[RemoteStore]:
        return zarr.storage.ObjectStore(self._store)

    def free_bytes(self) -> None:
        """There is no end to the room."""

    # --- shards ---------------------------------------------------------------------------------------------------------

    def create(self, key: str, data: memoryview) -> bool:
        """Put an object where there is none. False: there is one, which stays as it is."""
        try:
            obstore.put(self._client(len(data)), key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    def holds(self, sent: SentObject) -> bool:
        """Whether the object is there with these bytes."""
        try:
            if obstore.head(self._store, sent.key)["size"] != sent.nbytes:
                return False
            hasher = xxhash.xxh3_64(seed=0)
            for window in obstore.get(self._client(sent.nbytes), sent.key).stream(min_chunk_size=WINDOW_BYTES):
                hasher.update(memoryview(window))
        except FileNotFoundError:
            return False
        return hasher.intdigest() == sent.digest

    def delete(self, key: str) -> None:
        """See that there is no such object."""
        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def _client(self, nbytes: int) -> RemoteStore:
        """For a request that moves so many bytes: of a few, each with twice the time of the one before."""
        seconds = REQUEST_SECONDS
        while seconds * SLOWEST_BYTES_PER_SECOND < nbytes:
            seconds *= 2
        return self._connected(seconds)


def _exists(store: RemoteStore, key: str) -> bool:
    try:
        obstore.head(store, key)
    except FileNotFoundError:
        return False
    return True
