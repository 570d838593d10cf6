"""The objects of a store by key, wherever it is: what its one orchestrator reads and writes of metadata, tokens and samples."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from statetap.adapters.store.local_objects import LocalObjects
from statetap.adapters.store.locations import is_remote, local_path
from statetap.ports import StoreError

if TYPE_CHECKING:
    from zarr.storage import StoreLike

    from statetap.adapters.store.remote_objects import RemoteObjects


class Objects(Protocol):
    """The objects below one location, which `str` gives. Only threads call it. What fails, fails inside of `failing`."""

    @property
    def largest_bytes(self) -> int | None:
        """How large an object can be at most."""
        ...

    def failing(self, doing: str) -> AbstractContextManager[None]:
        """Within it, what the place itself has against it is a StoreError: "DOING LOCATION failed", and why."""
        ...

    def is_vacant(self) -> bool:
        """Nothing there, or nothing but what a creation leaves that was cut short at its very first object."""
        ...

    def exists(self, key: str) -> bool: ...

    def read(self, key: str) -> bytes | None:
        """The whole object, None if there is none."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Put the object there in one step, whatever is there. Durable when it returns."""
        ...

    def settle(self, key: str) -> None:
        """Make durable what zarr-python wrote there; an object of nothing but fill values may be missing."""
        ...

    def zarr_store(self) -> StoreLike:
        """What zarr-python opens the place by."""
        ...

    def free_bytes(self) -> int | None: ...


def objects_at(location: str) -> Objects:
    """The objects of the store at `location`.

    Raises:
        StoreError: it is no absolute path and no URL that can be connected to from here.
    """
    return remote_objects_at(location) if is_remote(location) else LocalObjects(local_path(location))


def remote_objects_at(location: str) -> RemoteObjects:
    """The same of a URL.

    Raises:
        StoreError: it cannot be connected to from here.
    """
    try:
        from statetap.adapters.store.remote_objects import RemoteObjects

        return RemoteObjects(location)
    except ImportError as e:
        raise StoreError(
            f"{location} needs obstore, which is not installed with the service: pip install 'statetap[object-stores]'"
        ) from e
    except ValueError as e:
        raise StoreError(str(e)) from e
