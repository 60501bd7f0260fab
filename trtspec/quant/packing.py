"""What a packer sees and gives: rows of a weight as stored, the scale of a group, NVFP4 bytes.

A packer reads what lies on disk (BF16, INT4 with group scales, FP8 with block scales), so that a source need not be
decoded where it can be translated. native has the one in C, decode the one in torch; the bytes are the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from trtspec.formats import FP8_BLOCK_SIZE, NVFP4_BLOCK, NVFP4_RANGE, WeightFormat

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = NVFP4_BLOCK


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight as stored: `values` [n, K] plain, [n, K/8] INT4 or [n, K] FP8, unsigned integers of the
    width of `dtype`, the safetensors code.

    `scale` is [n, K/group] for INT4, [ceil(n/height), ceil(K/width)] for FP8 in blocks of `block`.
    """

    format: WeightFormat
    dtype: str
    values: Array
    scale: Array | None = None
    scale_dtype: str = ""
    block: tuple[int, int] = FP8_BLOCK_SIZE

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * self.format.values_per_element

    def head(self, rows: int) -> Rows:
        """The first `rows` of prepared ones."""
        scale = None if self.scale is None else self.scale[:rows]
        return Rows(self.format, self.dtype, self.values[:rows], scale, self.scale_dtype)


class Scaling(NamedTuple):
    """What a group of linears shares: their largest magnitude and `scale_2`, both exact in float32."""

    amax: float
    scale_2: float

    @staticmethod
    def of(amax: float) -> Scaling:
        """As `nvfp4.scale_2_of`."""
        return Scaling(amax, float32(amax / NVFP4_RANGE) or float32(1.0 / NVFP4_RANGE))


def float32(value: float) -> float:
    """Rounded to float32; for one operation on float32 values in double this is the float32 result."""
    return ctypes.c_float(value).value


class Packer(Protocol):
    """`weight_scales` is max or mse; `name` is c or torch. `amax`, `pack` and `errors` take prepared rows."""

    name: str
    weight_scales: str

    def translates(self, rows: Rows) -> bool:
        """Whether it packs these quantized rows as they are stored."""

    def decode(self, rows: Rows, result: Array) -> None:
        """Fills uint16 `result` [n, K] with BF16 values."""

    def amax(self, rows: Rows) -> float:
        """max|w|; NaN or infinity where the weight is not finite."""

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        """Fills uint8 `packed` [n, K/2] and `scale` [n, K/16]; returns how many blocks are zero."""

    def errors(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> tuple[float, float]:
        """Squared error of the packed rows and squared norm of the source's."""


def decoded(rows: Rows, packer: Packer) -> Rows:
    """The rows as BF16."""
    if rows.scale is None and rows.dtype == "BF16":
        return rows
    values: Array = np.empty(rows.shape, np.uint16)
    packer.decode(rows, values)
    return Rows(WeightFormat.BF16, "BF16", values)


def prepared(rows: Rows, packer: Packer) -> Rows:
    """The rows as a packer packs them: plain, or quantized as it translates them; else decoded, once."""
    return rows if rows.scale is None or packer.translates(rows) else decoded(rows, packer)
