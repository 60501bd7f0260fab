"""Torch's tensors as the rows that a packer takes."""

import torch

from trtspec.checkpoint.tensors import CODES
from trtspec.formats import WeightFormat
from trtspec.quant.native import Rows


def rows_of(format: WeightFormat, *tensors: torch.Tensor) -> Rows:
    """Values, and their scale unless they are plain; they share the tensors' memory."""
    dtype, *scale_dtype = [CODES[tensor.dtype] for tensor in tensors]
    values, *scale = [
        tensor.contiguous().view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
        for tensor in tensors
    ]
    return Rows(format, dtype, values, *scale, *scale_dtype)
