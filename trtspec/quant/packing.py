"""Rows of a stored weight to NVFP4 bytes: in C where that compiles, in torch on a CPU or a GPU, always the same bytes.

A packer sees what lies on disk (BF16, INT4 with group scales, FP8 with block scales), so that a source need not be
decoded where it can be translated: an INT4 block has at most 16 values, one table for each (group scale, max|q|).
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trtspec.errors import MissingDependency, TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE, WeightFormat
from trtspec.quant import fp8_block, int4, nvfp4
from trtspec.quant.native import load_kernel

BLOCK = nvfp4.BLOCK


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight as stored: `values` [n, K] plain, int32 [n, K/8] INT4 or float8_e4m3fn [n, K].

    `scale` is bf16 [n, K/group] for INT4; float32 [ceil(n/height), ceil(K/width)] for FP8, whose `block` is given.
    """

    format: WeightFormat
    values: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = FP8_BLOCK_SIZE

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * self.format.values_per_element

    def head(self, rows: int) -> Rows:
        """The first `rows` of them."""
        scale = self.scale
        if scale is not None:
            scale = scale[: rows if self.format.is_grouped_integer else -(-rows // self.block[0])]
        return Rows(self.format, self.values[:rows], scale, self.block)


class Scaling(NamedTuple):
    """What a group of linears shares: their largest magnitude and `scale_2`, float32 scalars."""

    amax: torch.Tensor
    scale_2: torch.Tensor

    @staticmethod
    def of(amax: float) -> Scaling:
        value = torch.tensor(amax, dtype=torch.float32)
        return Scaling(value, nvfp4.scale_2_of(value))


class TorchPacker:
    """The definition, in torch; `device` is where it computes, `weight_scales` max or mse."""

    name = "torch"

    def __init__(self, weight_scales: str = "max", device: str = "cpu") -> None:
        self.weight_scales, self.device = weight_scales, torch.device(device)

    def decode(self, rows: Rows) -> torch.Tensor:
        """bf16 [n, K]; plain rows in their own dtype. On the CPU, whatever the device."""
        return self._decode(rows).cpu()

    def _decode(self, rows: Rows) -> torch.Tensor:
        values = rows.values.to(self.device)
        if rows.scale is None:
            return values
        scale = rows.scale.to(self.device)
        if rows.format.is_grouped_integer:
            return int4.dequantize(values, scale, torch.tensor(rows.shape))
        return fp8_block.dequantize(values, scale, rows.block)

    def amax(self, rows: Rows) -> float:
        """max|w|; NaN or infinity where the weight is not finite."""
        weight = self._decode(rows)
        return float(weight.abs().amax() if self.device.type != "cpu" else nvfp4.block_amax(weight).amax())

    def pack(self, rows: Rows, scaling: Scaling, packed: torch.Tensor, scale: torch.Tensor) -> int:
        """Fills uint8 `packed` [n, K/2] and `scale` [n, K/16]; returns how many blocks are zero."""
        weight = self._decode(rows)
        if self.device.type == "cpu":
            result = nvfp4.quantize(weight, scaling.amax, weight_scales=self.weight_scales)
        else:
            result = nvfp4.quantize_plain(weight, scaling.amax.to(self.device), self.weight_scales)
        packed.copy_(result.packed)
        scale.copy_(result.scale.view(torch.uint8))
        return int((weight.view(-1, BLOCK) == 0).all(-1).sum())

    def errors(self, rows: Rows, scaling: Scaling, packed: torch.Tensor, scale: torch.Tensor) -> tuple[float, float]:
        """Squared error of the packed rows and squared norm of the source's."""
        tensor = nvfp4.NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), scaling.scale_2)
        original = self.decode(rows).float()
        error = nvfp4.dequantize(tensor, torch.float32) - original
        return float(error.square().sum(dtype=torch.float64)), float(original.square().sum(dtype=torch.float64))


class NativePacker(TorchPacker):
    """The same in C; what C does not know (FP16 and FP32 weights, odd groups) goes to torch."""

    name = "c"

    def __init__(self, kernel: ctypes.CDLL, weight_scales: str = "max") -> None:
        super().__init__(weight_scales)
        self.kernel = kernel
        # zero pages of an anonymous map: resident only where classes occur
        self._tables = torch.frombuffer(mmap.mmap(-1, kernel.tables_bytes()), dtype=torch.uint8)
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def decode(self, rows: Rows) -> torch.Tensor:
        if not _knows(rows) or rows.scale is None:
            return super().decode(rows)
        return self._decode_into(rows, torch.empty(rows.shape, dtype=torch.bfloat16))

    def _decode_into(self, rows: Rows, result: torch.Tensor) -> torch.Tensor:
        assert rows.scale is not None
        (count, columns), scale, values = rows.shape, rows.scale, rows.values
        if rows.format.is_grouped_integer:
            source = (values.data_ptr(), scale.data_ptr(), scale.numel(), _pairs(rows))
            self.kernel.int4_decode(*source, result.data_ptr())
            return result
        height, width = rows.block
        for band, start in enumerate(range(0, count, height)):
            part = min(height, count - start)
            self.kernel.fp8_decode(
                values[start].data_ptr(), scale[band].data_ptr(), part, columns, width, result[start].data_ptr()
            )
        return result

    def _bf16(self, rows: Rows) -> torch.Tensor:
        """The rows as BF16 in a scratch buffer, valid until the next call."""
        if rows.scale is None:
            return rows.values
        size = rows.shape[0] * rows.shape[1]
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        return self._decode_into(rows, self._scratch[:size].view(rows.shape))

    def amax(self, rows: Rows) -> float:
        if not _knows(rows):
            return super().amax(rows)
        if rows.format.is_grouped_integer:
            assert rows.scale is not None
            source = (rows.values.data_ptr(), rows.scale.data_ptr(), rows.scale.numel(), _pairs(rows))
            bits = self.kernel.int4_amax(*source)
        else:
            weight = self._bf16(rows)
            bits = self.kernel.bf16_amax(weight.data_ptr(), weight.numel())
        return float(torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16))

    def pack(self, rows: Rows, scaling: Scaling, packed: torch.Tensor, scale: torch.Tensor) -> int:
        if not _knows(rows):
            return super().pack(rows, scaling, packed, scale)
        scale_2, targets = float(scaling.scale_2), (packed.data_ptr(), scale.data_ptr())
        if rows.format.is_grouped_integer and self.weight_scales == "max":
            assert rows.scale is not None
            source = (rows.values.data_ptr(), rows.scale.data_ptr(), rows.scale.numel(), _pairs(rows))
            return int(self.kernel.int4_pack(*source, scale_2, self._tables.data_ptr(), *targets))
        weight = self._bf16(rows)
        function = self.kernel.bf16_pack if self.weight_scales == "max" else self.kernel.bf16_pack_mse
        return int(function(weight.data_ptr(), weight.numel() // BLOCK, scale_2, *targets))

    def errors(self, rows: Rows, scaling: Scaling, packed: torch.Tensor, scale: torch.Tensor) -> tuple[float, float]:
        if not _knows(rows):
            return super().errors(rows, scaling, packed, scale)
        weight, sums = self._bf16(rows), (ctypes.c_double * 2)()
        arguments = (weight.data_ptr(), packed.data_ptr(), scale.data_ptr(), weight.numel() // BLOCK)
        self.kernel.error_sums(*arguments, float(scaling.scale_2), ctypes.addressof(sums))
        return sums[0], sums[1]


def _pairs(rows: Rows) -> int:
    """Pairs of blocks that share an INT4 scale; the kernel takes two blocks at a time. 0 where that is not whole."""
    assert rows.scale is not None
    size = rows.shape[1] // rows.scale.shape[1]
    return 0 if size % (2 * BLOCK) else size // (2 * BLOCK)


def _knows(rows: Rows) -> bool:
    if rows.format.is_grouped_integer:
        return rows.scale is not None and rows.scale.dtype == torch.bfloat16 and _pairs(rows) > 0
    if rows.format.has_block_scales:
        return rows.scale is not None and rows.scale.dtype == torch.float32
    return rows.values.dtype == torch.bfloat16


def choose_packer(weight_scales: str = "max", device: str = "cpu") -> TorchPacker:
    """C where it is compiled and proves itself, else torch; a GPU where `device` names one.

    Raises MissingDependency when the device is not there.
    """
    if device != "cpu":
        if not torch.cuda.is_available():
            raise MissingDependency(f"--device {device}: torch sees no CUDA device", "use --device cpu")
        return TorchPacker(weight_scales, device)
    kernel = load_kernel()
    if kernel is None or nvfp4.denormals_are_flushed():
        return TorchPacker(weight_scales)
    packer = NativePacker(kernel, weight_scales)
    _prove(packer)
    return packer


def _prove(packer: NativePacker) -> None:
    """A few thousand values through both; a compiler that rounds differently must not decide anybody's weights."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(32, 256, generator=generator) * torch.exp2(torch.arange(32.0) - 20).unsqueeze(1)).bfloat16()
    rows, plain = Rows(WeightFormat.BF16, weight), TorchPacker(packer.weight_scales)
    scaling = Scaling.of(plain.amax(rows))
    results = []
    for each in (packer, plain):
        target = torch.empty(32, 128, dtype=torch.uint8), torch.empty(32, 16, dtype=torch.uint8)
        results.append((each.amax(rows), each.pack(rows, scaling, *target), *target))
    (amax, zeros, *bytes_c), (expected, blank, *bytes_torch) = results
    if (amax, zeros) != (expected, blank) or not all(map(torch.equal, bytes_c, bytes_torch)):
        raise TrtspecError("the C kernel computes other bytes than torch on this machine", "set TRTSPEC_KERNEL=torch")
