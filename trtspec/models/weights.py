"""Loads the weights of a Kimi checkpoint, in any published format, into a `KimiModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.families.family import Part, Role
from trtspec.formats import stored_format
from trtspec.models import fast
from trtspec.models.k2 import KimiModel
from trtspec.models.w4a4 import NVFP4Experts, NVFP4Linear
from trtspec.quant import nvfp4
from trtspec.specs import ModelSpec

# Computation of NVFP4 linears: with 4-bit weights and activations, with 4-bit weights only, or with
# weights that are decoded to plain ones.
Activation = Literal["w4a4", "weight-only", "decoded"]


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    activation: Activation = "w4a4",
) -> KimiModel:
    """Loads the target from a checkpoint of any published format.

    bf16, int4 and fp8-block weights are decoded. The cache is FP8 if the checkpoint's config
    demands it. Raises TrtspecError if `trtspec inspect` finds an error in the checkpoint.

    dtype: compute dtype.
    activation: computation of NVFP4 linears.
    """
    target = require_target(path)
    spec = target.spec
    kv_dtype = torch.float8_e4m3fn if spec.quant.kv_cache else None
    with torch.device("meta"):
        model = KimiModel(spec, kv_dtype)
    with LazyTensors(target.checkpoint) as tensors:
        for mapping in layout(spec):
            install(model, mapping, tensors, dtype=dtype, device=device, activation=activation)
    fast.after_loading(model)
    return model.eval().requires_grad_(False)


def is_nvfp4(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the weight `name` is stored as NVFP4."""
    return stored_format(checkpoint.tensors, name.removesuffix(".weight")).is_fp4


def install(
    module: nn.Module,
    mapping: ParameterMapping,
    tensors: LazyTensors,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    activation: Activation = "w4a4",
    pool: Executor | None = None,
) -> None:
    """Decodes a parameter tensor by tensor, and puts it into `module`.

    Memory holds the parameter, and the tensors that are being decoded. An NVFP4 weight replaces its
    linear by a module that computes with `activation`, unless `activation` is "decoded".

    module: model or decoder layer, on the meta device or loaded.
    mapping: name of the parameter, and its tensors in the checkpoint.
    dtype: compute dtype.
    pool: threads that decode the tensors. None: the calling thread.
    """
    if activation != "decoded" and is_nvfp4(tensors.checkpoint, mapping.names[0]):
        linear = partial(
            nvfp4_linear, tensors=tensors, activation=activation, dtype=dtype, device=device
        )
        _install_nvfp4(module, mapping, linear)
        return
    owner, _, leaf = mapping.parameter.rpartition(".")
    owner_module = module.get_submodule(owner)
    # The router computes in float32.
    stored_dtype = torch.float32 if owner.endswith("mlp.gate") else dtype
    value = torch.empty(getattr(owner_module, leaf).shape, dtype=stored_dtype)
    # The rows of all experts follow each other.
    rows = value.flatten(0, 1) if value.dim() == 3 else value
    decode = partial(_decode_into, tensors=tensors)
    run = pool.map if pool else map
    # The loop waits for the threads, and raises their errors.
    for _ in run(decode, rows.split(mapping.rows), mapping.names):
        pass
    setattr(owner_module, leaf, nn.Parameter(value.to(device), requires_grad=False))


def _install_nvfp4(
    module: nn.Module,
    mapping: ParameterMapping,
    linear: Callable[[Sequence[str]], NVFP4Linear],
) -> None:
    """Replaces the module that owns the parameter by an NVFP4 module.

    Experts come in two calls: gate_up makes their module, and down completes it.

    linear: function that makes an NVFP4 linear from the names of its weights.
    """
    owner, _, leaf = mapping.parameter.rpartition(".")
    if not owner.endswith(".experts"):
        module.set_submodule(owner, linear(mapping.names))
    elif leaf == "gate_up":
        pairs = zip(mapping.names[::2], mapping.names[1::2], strict=True)
        module.set_submodule(owner, NVFP4Experts(map(linear, pairs), []))
    else:
        experts = module.get_submodule(owner)
        experts.down = nn.ModuleList(linear([name]) for name in mapping.names)


def _decode_into(target: torch.Tensor, name: str, tensors: LazyTensors) -> None:
    """Decodes the weight `name` into the rows `target`."""
    from trtspec.quant.decode import decoded

    target.copy_(decoded(tensors, name).reshape(target.shape))


@dataclass(frozen=True)
class ParameterMapping:
    """A parameter of the model, and the checkpoint tensors that make it up, row after row.

    Args:
        parameter: name of the parameter in the model or the decoder layer.
        role: role of the parameter in the family's table.
        names: names of the tensors in the checkpoint.
        rows: number of rows of each tensor.
    """

    parameter: str
    role: Role
    names: tuple[str, ...]
    rows: list[int]


def layout(spec: ModelSpec) -> Iterator[ParameterMapping]:
    """Yields every parameter of `KimiModel(spec)` with its tensors in a published checkpoint."""
    yield from _mappings(spec.family.ends(spec), spec.family.prefix)
    for index in range(spec.num_hidden_layers):
        for mapping in layer_layout(spec, index):
            yield replace(mapping, parameter=f"layers.{index}.{mapping.parameter}")


def layer_layout(spec: ModelSpec, index: int) -> Iterator[ParameterMapping]:
    """Yields every parameter of decoder layer `index`, under its name in `DecoderLayer`."""
    return _mappings(spec.family.layer(spec, index), spec.family.stem(index))


def _mappings(parts: Iterable[Part], stem: str) -> Iterator[ParameterMapping]:
    """Yields the parameters that `parts` describe, and their tensors.

    A parameter may have several parts (gate and up). If each expert has a copy of the parts, the
    tensors are in the order of the experts.

    stem: prefix of the tensors' names.
    """
    parts_of: dict[str, list[Part]] = {}
    for part in parts:
        parts_of.setdefault(part.parameter, []).append(part)
    for parameter, group in parts_of.items():
        first = group[0]
        numbered = list(product(range(first.copies), group))
        names = (stem + part.name.format(number) for number, part in numbered)
        rows = [part.shape[0] for _, part in numbered]
        yield ParameterMapping(parameter, first.role, tuple(names), rows)


def nvfp4_linear(
    names: Sequence[str], tensors: LazyTensors, activation: str, dtype: torch.dtype, device: str
) -> NVFP4Linear:
    """Makes an NVFP4 linear from one weight, or from several weights stacked (gate and up).

    Raises TrtspecError if stacked weights differ in one of their two per-tensor scales.

    names: names of the weights in the checkpoint.
    """
    stems = [name.removesuffix("weight") for name in names]
    scales = [(tensors[f"{stem}weight_scale_2"], tensors[f"{stem}input_scale"]) for stem in stems]
    scale_2, input_scale = scales[0]
    for stem, (stem_scale_2, stem_input_scale) in zip(stems, scales, strict=True):
        has_same_scale_2 = torch.equal(stem_scale_2, scale_2)
        if not (has_same_scale_2 and torch.equal(stem_input_scale, input_scale)):
            message = f"{stem}weight_scale_2 or input_scale differs from that of {stems[0]}; "
            message += "fused kernels share one scale"
            remedy = "requantize the checkpoint: trtspec quantize SRC -o OUT"
            raise TrtspecError(message, remedy)
    packed = torch.cat([tensors[f"{stem}weight"] for stem in stems])
    # The FP8 scales are joined as bytes, which every version of torch can concatenate.
    block_scales = [tensors[f"{stem}weight_scale"].view(torch.uint8) for stem in stems]
    scale = torch.cat(block_scales).view(torch.float8_e4m3fn)
    weight = nvfp4.NVFP4Tensor(packed, scale, scale_2)
    values = nvfp4.codes_times_scale(weight).to(dtype)
    return NVFP4Linear(values, weight.scale_2, input_scale, activation).to(device)
