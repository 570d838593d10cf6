"""bfloat16 for zarr-python: the registered extension data type that tensorstore reads and writes.

In metadata it is `"data_type": "bfloat16"` with a JSON number as fill value; in memory `ml_dtypes.bfloat16`. Zarr v2 has no such
type. `statetap_client.registration` makes it known to zarr-python.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any, ClassVar, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType

NATIVE_DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
NAME = "bfloat16"

# Zarr v3's JSON for floats that are no JSON numbers.
_SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True, kw_only=True, slots=True)
class BFloat16(ZDType[np.dtype[Any], Any], HasEndianness, HasItemSize):
    """Zarr v3's `bfloat16`, 2 bytes. Its scalars are `ml_dtypes.bfloat16`."""

    dtype_cls = type(NATIVE_DTYPE)
    _zarr_v3_name: ClassVar[str] = NAME

    @property
    def item_size(self) -> int:
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not ml_dtypes.bfloat16")
        return cls(endianness="big" if dtype != NATIVE_DTYPE else "little")

    def to_native_dtype(self) -> np.dtype[Any]:
        return NATIVE_DTYPE.newbyteorder(">" if self.endianness == "big" else "<")

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no bfloat16, so {data!r} cannot be one")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != NAME:
            raise DataTypeValidationError(f"{data!r} is not {NAME!r}")
        return cls()

    def to_json(self, zarr_format: int) -> str:  # type: ignore[override]
        """The data type's name.

        Raises:
            ValueError: for Zarr v2, which has no bfloat16.
        """
        if zarr_format != 3:
            raise ValueError("Zarr v2 has no bfloat16: create the array with zarr_format=3")
        return NAME

    def _check_scalar(self, data: object) -> TypeGuard[Any]:
        if isinstance(data, str):
            return data in _SPECIAL or data.startswith("0x")
        return isinstance(data, (int, float, np.integer, np.floating, ml_dtypes.bfloat16))

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} of type {type(data).__name__} is not a bfloat16 scalar")
        if isinstance(data, str):
            return self.from_json_scalar(data, zarr_format=3)
        return ml_dtypes.bfloat16(data)

    def default_scalar(self) -> Any:
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: object, *, zarr_format: int) -> Any:
        """A fill value: a number, one of Zarr's three names, or the bits as hexadecimal (`0x7fc0`)."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.array(int(data, 16), np.uint16).view(NATIVE_DTYPE)[()]
        if isinstance(data, str) and data in _SPECIAL:
            return ml_dtypes.bfloat16(_SPECIAL[data])
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return ml_dtypes.bfloat16(data)
        raise TypeError(f"{data!r} is not a bfloat16 fill value: expected a number, {', '.join(_SPECIAL)} or 0x and the bits")

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        value = float(self.cast_scalar(data))
        if isfinite(value):
            return value
        if isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
