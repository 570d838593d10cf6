"""`python -m statetap.api` writes the OpenAPI document to standard output."""

from __future__ import annotations

import sys

from statetap.api.app import render_openapi

sys.stdout.buffer.write(render_openapi())
