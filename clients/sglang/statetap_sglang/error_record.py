"""The error record `req_<N>.error.json`: a capture that was lost, and why."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

from statetap_sglang.filesystem import read_small
from statetap_sglang.format import FORMAT_VERSION, DumpFormatError
from statetap_sglang.strict_json import load_object

MAX_RECORD_BYTES = 1 << 16
# JSON escapes take up to 12 bytes a character, so a record of two such texts always fits.
MAX_TEXT = 2000
OVER_BUDGET = "bytes are over the tap's budget"
"""What a reason says where the tap's budget left no room."""
_WANT_OF_ROOM = (OVER_BUDGET, os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """`rid` and `reason` of a lost capture. `lost` above 1: so many captures were lost, of which this is the last."""

    rid: str
    reason: str
    lost: int = 1

    @property
    def is_for_want_of_room(self) -> bool:
        """Whether the budget or the file system left no room: by the reason, for a record has no other field that tells."""
        return any(text in self.reason for text in _WANT_OF_ROOM)

    def encode(self) -> bytes:
        """As JSON, with over-long texts cut: a record must always be writable."""
        return json.dumps(
            {"format_version": FORMAT_VERSION, "rid": _writable(self.rid), "reason": _writable(self.reason), "lost": self.lost}
        ).encode()

    @classmethod
    def read(cls, path: Path) -> ErrorRecord:
        """Read and validate a record. Unknown keys are ignored.

        Raises:
            FileNotFoundError: it is gone.
            DumpFormatError: it is not an error record, or of another format version.
        """
        found = load_object(path, read_small(path, MAX_RECORD_BYTES))
        if found.get("format_version") != FORMAT_VERSION:
            raise DumpFormatError(path, f"format_version is {found.get('format_version')!r}, this is version {FORMAT_VERSION}")
        rid, reason, lost = found.get("rid"), found.get("reason"), found.get("lost")
        if not isinstance(rid, str) or not isinstance(reason, str):
            raise DumpFormatError(path, "rid and reason must be strings")
        if type(lost) is not int or lost < 1:
            raise DumpFormatError(path, f"lost is {lost!r}, it must be a whole number of at least 1")
        return cls(rid, reason, lost)


def _writable(text: str) -> str:
    return text[:MAX_TEXT].encode(errors="replace").decode()
