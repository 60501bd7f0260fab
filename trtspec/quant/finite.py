"""NaN and infinity in tensors as they are stored, copied ones included: which value it is, so that a person finds it.

Packers look for them in every tensor that passes, in one run over bytes that are in memory anyway. A copied NaN would
be invisible until the model's first answer, and one in a norm or a router spoils every token.
"""

from __future__ import annotations

import math

import numpy as np

from trtspec.checkpoint.headers import DTYPE_BITS
from trtspec.errors import TrtspecError
from trtspec.quant.packing import Array

# safetensors code -> the bits without the sign, and the least of them that is not finite
PATTERNS = {
    "BF16": (0x7FFF, 0x7F80),
    "F16": (0x7FFF, 0x7C00),
    "F32": (0x7FFFFFFF, 0x7F800000),
    "F64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "F8_E4M3": (0x7F, 0x7F),  # has no infinity
    "F8_E5M2": (0x7F, 0x7C),
    "F8_E8M0": (0xFF, 0xFF),
}


def first_not_finite(data: Array, dtype: str) -> int | None:
    """Which element of the uint8 bytes of a tensor of that safetensors dtype is NaN or infinite first; None: none is,
    or the dtype has neither."""
    if dtype not in PATTERNS:
        return None
    mask, least = PATTERNS[dtype]
    bits = data.view(f"u{DTYPE_BITS[dtype] // 8}")
    found = np.flatnonzero((bits & bits.dtype.type(mask)) >= least)
    return int(found[0]) if found.size else None


def not_finite(name: str, shard: str, shape: tuple[int, ...], index: int | None) -> TrtspecError:
    """The error that names the tensor, its shard and the place of the value, whose flat index it gets."""
    where = ""
    if index is not None and math.prod(shape) > 1:
        where = f" at {[int(part) for part in np.unravel_index(index, shape)]}"
    return TrtspecError(
        f"TS-QUANT-NOT-FINITE {name} in {shard} holds NaN or infinity{where}",
        "download that file again and compare its sha256 with the hub's; a model with NaN in it cannot be served",
    )
