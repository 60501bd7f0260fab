"""Loads a Kimi checkpoint of any published format into `KimiModel`: strict, all misfits in one report."""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError, UsageError
from trtspec.formats import stored_format
from trtspec.models.kimi import KimiModel
from trtspec.models.names import Source, layout, rows_of
from trtspec.models.sharding import WHOLE, Sharding
from trtspec.specs import ModelSpec

Activation = Literal["w4a4", "weight-only"]


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    activation: Activation = "w4a4",
    kv_cache: Literal["auto", "none", "fp8"] = "auto",
    sharding: Sharding = WHOLE,
) -> KimiModel:
    """Builds the model of a checkpoint in any format (bf16, int4, fp8-block: decoded; nvfp4: computed as NVFP4).

    `dtype` is the compute type. `kv_cache="auto"` keeps latents as FP8 when the checkpoint asks for it. `sharding`: the
    part of the model that this process holds.
    Raises TrtspecError for a checkpoint in which `trtspec inspect` finds an error.
    """
    from trtspec.models import quantized

    target = require_target(path)
    checkpoint, spec = target.checkpoint, target.spec
    if kv_cache not in ("auto", "none", "fp8"):
        raise UsageError(f"kv_cache {kv_cache!r} is not one of auto, none, fp8")
    fp8_kv = kv_cache == "fp8" or (kv_cache == "auto" and spec.quant.kv_cache == "fp8")
    with torch.device("meta"):
        model = KimiModel(spec, kv_dtype=torch.float8_e4m3fn if fp8_kv else None, sharding=sharding)
    tensors = LazyTensors(checkpoint)
    for source in layout(spec):
        if is_nvfp4(tensors, source.names[0]):
            how = quantized.How(activation, dtype, device, sharding)
            quantized.install(model, source.parameter, source.names, tensors, how)
        else:
            install(model, source, tensors, spec, dtype=dtype, device=device, sharding=sharding)
    tensors.close()
    return model.eval().requires_grad_(False)


def is_nvfp4(tensors: LazyTensors, name: str) -> bool:
    """Whether the weight `name` is stored as NVFP4."""
    return stored_format(tensors, name.removesuffix(".weight")).is_fp4


def install(
    module: nn.Module,
    source: Source,
    tensors: LazyTensors,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    pool: Executor | None = None,
    sharding: Sharding = WHOLE,
) -> None:
    """Decodes `source` into its parameter of `module`, part by part, in the threads of `pool` if there is one.

    Memory holds the parameter and the parts in work. Raises TrtspecError when a shape is not the config's.
    """
    owner, _, leaf = source.parameter.rpartition(".")
    place = module.get_submodule(owner)
    shape = getattr(place, leaf).shape
    keep = torch.float32 if owner.endswith("mlp.gate") else dtype  # the router computes in float32
    value = torch.empty(shape, dtype=keep)
    rows = value.flatten(0, 1) if value.dim() == 3 else value
    parts = zip(rows.split(rows_of(spec, source, len(rows))), source.names, strict=True)
    decode = partial(_decode_into, tensors=tensors, spec=spec, sharding=sharding)
    for _ in (pool.map if pool else map)(lambda part: decode(*part), parts):
        pass
    setattr(place, leaf, nn.Parameter(value.to(device), requires_grad=False))


def _decode_into(target: torch.Tensor, name: str, tensors: LazyTensors, spec: ModelSpec, sharding: Sharding) -> None:
    from trtspec.quant.decode import decoded

    value = sharding.cut(decoded(tensors, spec, name), name)
    if value.numel() != target.numel():
        raise TrtspecError(
            f"{name}: shape {tuple(value.shape)}, but config.json implies {tuple(target.shape)}",
            "config.json and weights do not belong together; download both again",
        )
    target.copy_(value.reshape(target.shape))
