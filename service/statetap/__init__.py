"""Statetap, the service: drives SGLang workers, verifies their dumps and streams them into one Zarr store."""

__version__ = "0.1.0"
