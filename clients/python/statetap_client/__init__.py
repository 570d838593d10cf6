"""Statetap's client: HTTP client, command line, and the reader of its stores.

Importing it makes bfloat16 known to zarr-python.
"""

from statetap_client.registration import register_bfloat16

__version__ = "0.1.0"

register_bfloat16()
