"""Which of a local store's arrays can be read by byte range; what it does not know is left to zarr-python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from statetap_client import layout
from statetap_client.byte_ranges import PAGE_BYTES
from statetap_client.shard_files import ShardFiles
from statetap_client.token_files import TokenFiles


def hidden_files(root: Path, names: Iterable[str], *, direct: bool) -> dict[str, ShardFiles]:
    """Those of the hidden arrays `names` that are uncompressed shards."""
    documents = {name: _document(root, name) for name in names}
    return {
        name: ShardFiles(root, name, document, direct=direct)
        for name, document in documents.items()
        if layout.is_uncompressed_sharding(document["codecs"])
    }


def token_files(root: Path) -> dict[str, TokenFiles]:
    """Those of the token arrays that are laid out as the service does."""
    documents = {name: _document(root, name) for name in layout.TOKEN_ARRAYS if (root / layout.metadata_key(name)).exists()}
    return {name: TokenFiles(root, name, document) for name, document in documents.items() if layout.is_token_sharding(document)}


def reads_directly(nbytes: int) -> bool:
    """Whether a store of that size is better read past the page cache: it is more than half of the machine's memory."""
    return nbytes > os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES // 2


def _document(root: Path, name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((root / layout.metadata_key(name)).read_bytes()))
