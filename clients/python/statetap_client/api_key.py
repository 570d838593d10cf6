"""The key that a client brings: from a variable or a file, never a command line, which every user of the machine can see."""

from __future__ import annotations

import os
import re
from pathlib import Path

from statetap_client.errors import NoUsableKey

KEY_VARIABLE = "STATETAP_API_KEY"
KEY_FILE_VARIABLE = "STATETAP_API_KEY_FILE"
LONGEST_FILE = 4096
_KEY = re.compile(r"[!-~]+", re.ASCII)


def find_api_key(given: str | None) -> str | None:
    """The key to bring: the given one, else that of STATETAP_API_KEY, else that in the file of STATETAP_API_KEY_FILE; else none.

    Raises:
        NoUsableKey: what is there cannot be a key.
    """
    if given is not None:
        return _checked(given, "the given key")
    if told := os.environ.get(KEY_VARIABLE):
        return _checked(told, KEY_VARIABLE)
    if file := os.environ.get(KEY_FILE_VARIABLE):
        return read_api_key(Path(file))
    return None


def read_api_key(file: Path) -> str:
    """The key that is all of a file's content, white space around it aside. NoUsableKey: it cannot be read, or holds none."""
    try:
        with file.open(encoding="ascii") as opened:
            text = opened.read(LONGEST_FILE)
    except OSError as error:
        raise NoUsableKey(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    return _checked(text, str(file))


def headers(api_key: str | None) -> dict[str, str]:
    """What goes with every request."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _checked(text: str, where: str) -> str:
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise NoUsableKey(f"{where} holds no key: one word of printable ASCII is expected, as `statetap key` prints it")
    return key
