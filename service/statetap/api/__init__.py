"""The HTTP API, version 1 (contract §5): routes that are declared once, for the dispatcher and for the OpenAPI document alike."""
