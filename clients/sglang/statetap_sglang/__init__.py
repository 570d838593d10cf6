"""Statetap's dump format, and later its SGLang plugin: `format`, `beacon`, `publisher`, `reader`, `plain`."""

__version__ = "0.1.0"
