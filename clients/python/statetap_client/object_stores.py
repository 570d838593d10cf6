"""Stores at object stores (s3://, gs://, az://): how a URL is connected to.

Credentials, region and endpoint are this machine's, from where obstore takes them: the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT, AWS_ALLOW_HTTP, … and their likes for the others), else the machine's own role.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    RemoteStore = S3Store | GCSStore | AzureStore

SCHEMES: Final = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""By scheme: what the names of its variables begin with."""
CONNECT_SECONDS: Final = 10
RETRIES: Final = 3


class ObstoreMissing(ImportError):
    """What speaks to object stores is not installed; the message says how to install it."""


def is_object_url(place: str) -> bool:
    """Whether a store's place is a URL of an object store that this module connects to."""
    scheme, separator, _ = place.partition("://")
    return bool(separator) and scheme in SCHEMES


def connect(url: str, *, request_seconds: float = 60) -> RemoteStore:
    """What obstore reads and writes below `url`. Sends nothing yet. Each request may take so long, and is tried a few times.

    Raises:
        ObstoreMissing: obstore is not installed.
        ValueError: there is no such scheme, or the machine's configuration cannot be used.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ValueError(f"{url} is no URL of an object store; these are known: {', '.join(f'{known}://' for known in SCHEMES)}")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as e:
        raise ObstoreMissing(
            f"{url} needs obstore, which is not installed: pip install 'statetap[object-stores]', "
            "or 'statetap-client[object-stores]' to read alone"
        ) from e
    kinds: dict[str, type[RemoteStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    try:
        return kinds[scheme].from_url(
            url,
            # Options given here stand in for all of the environment's.
            client_options={
                "timeout": timedelta(seconds=request_seconds),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "allow_http": os.environ.get(f"{SCHEMES[scheme]}_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on"),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=60),
                "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
            },
        )
    except BaseError as e:
        raise ValueError(f"{url} cannot be connected to: {first_line(e)}") from e


def object_store_errors() -> tuple[type[Exception], ...]:
    """What reading from an object store may raise besides Python's own errors: for `except`."""
    try:
        from obstore.exceptions import BaseError
    except ImportError:
        return ()
    return (BaseError,)


def first_line(error: BaseException) -> str:
    """What an error of obstore says; what follows in it is for those who work on obstore."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
