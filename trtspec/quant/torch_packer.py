"""The packer in torch: the definition of the bytes, on a CPU or a GPU, and what the C kernel does not know."""

from __future__ import annotations

import torch

from trtspec.checkpoint.tensors import CODES, DTYPES
from trtspec.formats import FP8_BLOCK_SIZE, WeightFormat
from trtspec.quant import nvfp4
from trtspec.quant.decode import dequantize
from trtspec.quant.packing import BLOCK, Array, Rows, Scaling

CHUNK = 1 << 23  # values


def rows_of(
    format: WeightFormat,
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    block: tuple[int, int] = FP8_BLOCK_SIZE,
) -> Rows:
    """Rows of tensors at hand, on the CPU; they share the tensors' memory."""
    code = CODES[values.dtype]
    if scale is None:
        return Rows(format, code, _array(values), block=block)
    return Rows(format, code, _array(values), _array(scale), CODES[scale.dtype], block)


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.contiguous().view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    return array


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array.view("u1")).view(DTYPES[dtype])


class TorchPacker:
    """`device` is where it computes."""

    name = "torch"

    def __init__(self, weight_scales: str = "max", device: str = "cpu") -> None:
        self.weight_scales, self.device = weight_scales, torch.device(device)

    def translates(self, rows: Rows) -> bool:
        return False

    def decode(self, rows: Rows, result: Array) -> None:
        _tensor(result, "BF16").copy_(self.decoded(rows))

    def decoded(self, rows: Rows) -> torch.Tensor:
        """bf16 [n, K] on the device; plain rows in their own dtype."""
        values = _tensor(rows.values, rows.dtype).to(self.device)
        if rows.scale is None:
            return values
        scale = _tensor(rows.scale, rows.scale_dtype).to(self.device)
        shape = [torch.tensor(rows.shape)] if "shape" in rows.format.storage.kinds else []
        return dequantize(rows.format, [values, scale, *shape], rows.block)

    def amax(self, rows: Rows) -> float:
        return float(self.decoded(rows).abs().amax())

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        weight, amax, zeros = self.decoded(rows), torch.tensor(scaling.amax, device=self.device), 0
        step = max(1, CHUNK // weight.shape[1])
        for first in range(0, len(weight), step):  # float32 intermediates of a few rows, not of the whole
            part = slice(first, first + step)
            result = nvfp4.quantize(weight[part], amax, self.weight_scales)
            _tensor(packed[part], "U8").copy_(result.packed)
            _tensor(scale[part], "U8").copy_(result.scale.view(torch.uint8))
            zeros += int((weight[part].reshape(-1, BLOCK) == 0).all(-1).sum())
        return zeros

    def errors(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> tuple[float, float]:
        scales = _tensor(scale, "F8_E4M3")
        tensor = nvfp4.NVFP4Tensor(_tensor(packed, "U8"), scales, torch.tensor(scaling.scale_2))
        original = self.decoded(rows).cpu().float()
        error = nvfp4.dequantize(tensor, torch.float32) - original
        return float(error.square().sum(dtype=torch.float64)), float(original.square().sum(dtype=torch.float64))
