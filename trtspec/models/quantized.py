"""NVFP4 forms of the linears: W4A4 as an FP4 tensor core computes it, or weight-only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.models.moe import dispatch
from trtspec.models.sharding import WHOLE, Sharding
from trtspec.quant import nvfp4


class NVFP4Linear(nn.Module):
    """A linear whose weight is NVFP4, computed as an FP4 tensor core does.

    Both operands enter the product as E2M1 value times FP8 block scale, which bf16 holds exactly; the two
    per-tensor scales multiply the accumulated result. With `activation="weight-only"` x stays as it is.
    """

    values: Tensor  # E2M1 value times FP8 block scale, [out, in]
    scale_2: Tensor  # float32 scalar
    input_scale: Tensor  # float32 scalar

    def __init__(self, weight: nvfp4.NVFP4Tensor, input_scale: Tensor, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = activation
        self.register_buffer("values", nvfp4.codes_times_scale(weight).to(dtype))
        self.register_buffer("scale_2", weight.scale_2.float())
        self.register_buffer("input_scale", input_scale.float())
        self.out_features, self.in_features = self.values.shape[0], self.values.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "weight-only":
            return (F.linear(x, self.values) * self.scale_2).to(x.dtype)
        values, input_scale = nvfp4.fake_quantize_activation(x, self.input_scale)
        return (F.linear(values.to(x.dtype), self.values) * (self.scale_2 * input_scale)).to(x.dtype)


class NVFP4Experts(nn.Module):
    """Routed experts in NVFP4; each expert is a pair of NVFP4 products with its own scales (see NVFP4Linear)."""

    def __init__(self, gate_up: Sequence[nn.Module], down: Sequence[nn.Module]) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return dispatch(x, ids, weights, len(self.down), self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up[expert](x).chunk(2, -1)
        return self.down[expert](F.silu(gate) * up)


class How(NamedTuple):
    """How NVFP4 modules are made: `activation` as of `NVFP4Linear`, type, device, and the part that a rank holds."""

    activation: str
    dtype: torch.dtype
    device: str
    sharding: Sharding = WHOLE


def install(model: nn.Module, parameter: str, names: tuple[str, ...], tensors: LazyTensors, how: How) -> None:
    """Replaces the linear (or the stacked experts) that owns `parameter` by NVFP4 modules read from the checkpoint."""
    if parameter.endswith(".experts.gate_up"):
        pairs = [linear(names[i : i + 2], tensors, how) for i in range(0, len(names), 2)]
        model.set_submodule(parameter.removesuffix(".gate_up"), NVFP4Experts(pairs, []))
    elif parameter.endswith(".experts.down"):
        experts = model.get_submodule(parameter.removesuffix(".down"))
        experts.down = nn.ModuleList(linear((name,), tensors, how) for name in names)
    else:
        model.set_submodule(parameter.removesuffix(".weight"), linear(names, tensors, how))


def linear(names: tuple[str, ...], tensors: LazyTensors, how: How) -> NVFP4Linear:
    """One NVFP4 linear out of one weight, or of gate and up stacked; stacked weights must share both tensor scales."""
    stems = [name.removesuffix("weight") for name in names]
    scales = [(tensors[f"{stem}weight_scale_2"], tensors[f"{stem}input_scale"]) for stem in stems]
    for stem, (scale_2, input_scale) in zip(stems, scales, strict=True):
        if not (torch.equal(scale_2, scales[0][0]) and torch.equal(input_scale, scales[0][1])):
            raise TrtspecError(
                f"{stem}weight_scale_2 or input_scale differs from that of {stems[0]}; fused kernels share one scale",
                "requantize the checkpoint: trtspec quantize SRC -o OUT",
            )
    cut = how.sharding.cut  # codes, two in a byte, and scales, one for 16, in the same parts
    packed = torch.cat([cut(tensors[f"{stem}weight"], f"{stem}weight") for stem in stems])
    scales_of = [cut(tensors[f"{stem}weight_scale"].view(torch.uint8), f"{stem}weight") for stem in stems]
    scale = torch.cat(scales_of).view(torch.float8_e4m3fn)
    weight = nvfp4.NVFP4Tensor(packed, scale, scales[0][0])
    return NVFP4Linear(weight, scales[0][1], how.activation, how.dtype).to(how.device)
