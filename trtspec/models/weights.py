"""From a Kimi checkpoint of any published format to a `KimiModel` that decodes: the names of its weights, loading them
(strict, all misfits in one report), their NVFP4 forms, and their layout for products of few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.families.family import Part, Role
from trtspec.formats import stored_format
from trtspec.models.kimi import KimiModel
from trtspec.models.layers import LatentAttention, Linear, RMSNorm, by_input
from trtspec.models.moe import Experts, MoE, dispatch, is_small, together
from trtspec.models.precision import pack
from trtspec.quant import nvfp4
from trtspec.specs import ModelSpec

Activation = Literal[
    "w4a4", "weight-only", "decoded"
]  # how NVFP4 weights are computed; decoded: as plain ones


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    activation: Activation = "w4a4",
) -> KimiModel:
    """Builds the model of a checkpoint in any format (bf16, int4, fp8-block: decoded; nvfp4: computed as NVFP4).

    `dtype` is the compute type. Latents are kept as FP8 when the checkpoint asks for it.
    Raises TrtspecError for a checkpoint in which `trtspec inspect` finds an error.
    """
    target = require_target(path)
    checkpoint, spec = target.checkpoint, target.spec
    with torch.device("meta"):
        model = KimiModel(spec, torch.float8_e4m3fn if spec.quant.kv_cache else None)
    with LazyTensors(checkpoint) as tensors:
        for source in layout(spec):
            install(model, source, tensors, dtype=dtype, device=device, activation=activation)
    return model.eval().requires_grad_(False)


def is_nvfp4(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the weight `name` is stored as NVFP4."""
    return stored_format(checkpoint.tensors, name.removesuffix(".weight")).is_fp4


def install(
    module: nn.Module,
    source: Source,
    tensors: LazyTensors,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    activation: Activation = "w4a4",
    pool: Executor | None = None,
) -> None:
    """Decodes `source` into its parameter of `module`, part by part, in the threads of `pool` if there is one.

    NVFP4 weights become modules that compute with `activation`, unless it is "decoded". Memory holds the parameter and
    the parts in work.
    """
    owner, _, leaf = source.parameter.rpartition(".")
    if activation != "decoded" and is_nvfp4(tensors.checkpoint, source.names[0]):
        linear = partial(
            nvfp4_linear, tensors=tensors, activation=activation, dtype=dtype, device=device
        )
        if not owner.endswith(".experts"):
            module.set_submodule(owner, linear(source.names))
        elif leaf == "gate_up":
            pairs = zip(source.names[::2], source.names[1::2], strict=True)
            module.set_submodule(owner, NVFP4Experts(map(linear, pairs), []))
        else:
            module.get_submodule(owner).down = nn.ModuleList(
                linear([name]) for name in source.names
            )
        return
    place = module.get_submodule(owner)
    shape = getattr(place, leaf).shape
    keep = torch.float32 if owner.endswith("mlp.gate") else dtype  # the router computes in float32
    value = torch.empty(shape, dtype=keep)
    rows = value.flatten(0, 1) if value.dim() == 3 else value
    parts = zip(rows.split(source.rows), source.names, strict=True)
    decode = partial(_decode_into, tensors=tensors)
    for _ in (pool.map if pool else map)(lambda part: decode(*part), parts):
        pass
    setattr(place, leaf, nn.Parameter(value.to(device), requires_grad=False))


def _decode_into(target: torch.Tensor, name: str, tensors: LazyTensors) -> None:
    from trtspec.quant.decode import decoded

    target.copy_(decoded(tensors, name).reshape(target.shape))


@dataclass(frozen=True)
class Source:
    """One parameter and the checkpoint tensors whose rows, so many of each, concatenated in order are its value."""

    parameter: str
    role: Role
    names: tuple[str, ...]
    rows: list[int]


def layout(spec: ModelSpec) -> Iterator[Source]:
    """Every parameter of `KimiModel(spec)` with its names in a published checkpoint."""
    yield from _sources(spec.family.ends(spec), spec.family.prefix)
    for index in range(spec.num_hidden_layers):
        for source in layer_layout(spec, index):
            yield replace(source, parameter=f"layers.{index}.{source.parameter}")


def layer_layout(spec: ModelSpec, index: int) -> Iterator[Source]:
    """Every parameter of decoder layer `index`, named as in its `DecoderLayer` (without `layers.N.`)."""
    return _sources(spec.family.layer(spec, index), spec.family.stem(index))


def _sources(parts: Iterable[Part], stem: str) -> Iterator[Source]:
    """Parts of one parameter follow each other, expert after expert."""
    members: dict[str, list[Part]] = {}
    for part in parts:
        members.setdefault(part.parameter, []).append(part)
    for parameter, group in members.items():
        numbered = [(part, number) for number in range(group[0].copies) for part in group]
        names = (stem + part.name.format(number) for part, number in numbered)
        rows = [part.shape[0] for part, _ in numbered]
        yield Source(parameter, group[0].role, tuple(names), rows)


class NVFP4Linear(nn.Module):
    """A linear whose weight is NVFP4, computed as an FP4 tensor core does.

    Both operands enter the product as E2M1 value times FP8 block scale, which bf16 holds exactly; the two
    per-tensor scales multiply the accumulated result. With `activation="weight-only"` x stays as it is.
    """

    values: Tensor  # E2M1 value times FP8 block scale, [out, in]
    scale_2: Tensor  # float32 scalar
    input_scale: Tensor  # float32 scalar

    def __init__(
        self, values: Tensor, scale_2: Tensor, input_scale: Tensor, activation: str
    ) -> None:
        super().__init__()
        self.activation = activation
        self.register_buffer("values", values)
        self.register_buffer("scale_2", scale_2.float())
        self.register_buffer("input_scale", input_scale.float())
        self.out_features, self.in_features = self.values.shape[0], self.values.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "weight-only":
            return (F.linear(x, self.values) * self.scale_2).to(x.dtype)
        values, input_scale = nvfp4.fake_quantize_activation(x, self.input_scale)
        return (F.linear(values.to(x.dtype), self.values) * (self.scale_2 * input_scale)).to(
            x.dtype
        )


class NVFP4Experts(nn.Module):
    """Routed experts in NVFP4; each expert is a pair of NVFP4 products with its own scales (see NVFP4Linear)."""

    def __init__(self, gate_up: Iterable[nn.Module], down: Iterable[nn.Module]) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `Experts.forward`."""
        return dispatch(x, ids, weights, len(self.down), self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up[expert](x).chunk(2, -1)
        return self.down[expert](F.silu(gate) * up)


def nvfp4_linear(
    names: Sequence[str], tensors: LazyTensors, activation: str, dtype: torch.dtype, device: str
) -> NVFP4Linear:
    """One NVFP4 linear out of one weight, or of gate and up stacked; stacked weights must share both tensor scales."""
    stems = [name.removesuffix("weight") for name in names]
    scales = [(tensors[f"{stem}weight_scale_2"], tensors[f"{stem}input_scale"]) for stem in stems]
    for stem, (scale_2, input_scale) in zip(stems, scales, strict=True):
        if not (torch.equal(scale_2, scales[0][0]) and torch.equal(input_scale, scales[0][1])):
            raise TrtspecError(
                f"{stem}weight_scale_2 or input_scale differs from that of {stems[0]}; fused kernels share one scale",
                "requantize the checkpoint: trtspec quantize SRC -o OUT",
            )
    packed = torch.cat([tensors[f"{stem}weight"] for stem in stems])
    scale = torch.cat([tensors[f"{stem}weight_scale"].view(torch.uint8) for stem in stems]).view(
        torch.float8_e4m3fn
    )
    weight = nvfp4.NVFP4Tensor(packed, scale, scales[0][0])
    values = nvfp4.codes_times_scale(weight).to(dtype)
    return NVFP4Linear(values, weight.scale_2, scales[0][1], activation).to(device)


@torch.no_grad()
def prepare_for_decoding(model: nn.Module) -> None:
    """Prepares a loaded model: the same function, its weights laid out for products of few rows. In place; does nothing
    the second time.

    Large float32 weights on a CPU get a packed copy. Smaller ones with at least as many outputs as inputs are laid out
    in memory as [in, out], which takes up to a third off a product of one to sixteen rows. Their norms
    take fewer operators. Small experts of plain weights are stacked.

    Weights must not change afterwards: packed and stacked copies would not follow.
    """
    for module in list(model.modules()):
        if isinstance(module, Linear) and not module.used_in_parts and module.packed is None:
            module.packed = pack(module.weight)
            wide = module.weight.shape[0] >= module.weight.shape[1]
            if module.packed is None and wide and is_float32_on_cpu(module.weight):
                module.weight.data = by_input(module.weight.data)
        elif isinstance(module, RMSNorm) and is_float32_on_cpu(module.weight):
            module.fold()
        elif isinstance(module, LatentAttention) and module.folded is None:
            if is_float32_on_cpu(module.kv_b_proj.weight):
                module.fold()
        elif isinstance(module, MoE) and module.together is None:
            module.together = together(module)
        elif (
            isinstance(module, Experts)
            and is_float32_on_cpu(module.down)
            and is_small(module.gate_up, module.down)
        ):
            module.gate_up.data, module.down.data = (
                by_input(module.gate_up.data),
                by_input(module.down.data),
            )


def is_float32_on_cpu(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_cpu
