"""The names of the dumps of each request, for the response's `meta_info`: bounded, oldest requests forgotten first."""

from __future__ import annotations

from collections import OrderedDict

MAX_REQUESTS = 4096
MAX_NAMES = 4096


class DumpNames:
    """Names per request id, over all passes and generations. For the forward path's thread alone."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_names: int = MAX_NAMES) -> None:
        self._max_requests = max_requests
        self._max_names = max_names
        self._names: OrderedDict[str, list[str]] = OrderedDict()

    def add(self, rid: str, name: str) -> None:
        names = self._names.setdefault(rid, [])
        self._names.move_to_end(rid)
        if len(names) < self._max_names:
            names.append(name)
        if len(self._names) > self._max_requests:
            self._names.popitem(last=False)

    def of(self, rid: str) -> list[str] | None:
        """All names so far, None for a request that has none."""
        names = self._names.get(rid)
        return None if names is None else list(names)
