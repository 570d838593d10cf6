"""The ways to write a file, by name: what the disk does not have that the tests run on is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from statetap.adapters.store.object_files import WriteWay
from statetap.adapters.store.write_ways import past_the_page_cache

WAYS = ("straight", "staged", "cached")


def find_way(name: str, directory: Path) -> WriteWay:
    if name == "cached":
        return WriteWay()
    for way in past_the_page_cache(directory):
        if way.staged == (name == "staged"):
            return way
    pytest.skip("this file system has no O_DIRECT")
