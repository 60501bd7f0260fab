"""Loads a Kimi checkpoint of any published format into `KimiModel`: strict, all misfits in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from trtspec.checkpoint.detect import target_spec
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError, UsageError
from trtspec.models.kimi import KimiModel
from trtspec.models.names import Source, layout
from trtspec.specs import ModelSpec

Activation = Literal["w4a4", "weight-only"]


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    activation: Activation = "w4a4",
    kv_cache: Literal["auto", "none", "fp8"] = "auto",
) -> KimiModel:
    """Builds the model of a checkpoint in any format (bf16, int4, fp8-block: decoded; nvfp4: computed as NVFP4).

    `dtype` is the compute type. `kv_cache="auto"` keeps latents as FP8 when the checkpoint asks for it.
    Raises TrtspecError naming every missing or misshapen tensor at once.
    """
    from trtspec.models import quantized

    checkpoint = Checkpoint.open(Path(path))
    spec = target_spec(checkpoint)
    if kv_cache not in ("auto", "none", "fp8"):
        raise UsageError(f"kv_cache {kv_cache!r} is not one of auto, none, fp8")
    fp8_kv = kv_cache == "fp8" or (kv_cache == "auto" and spec.quant.kv_cache == "fp8")
    with torch.device("meta"):
        model = KimiModel(spec, kv_dtype=torch.float8_e4m3fn if fp8_kv else None)
    tensors = LazyTensors(checkpoint)
    missing = [name for source in layout(spec) for name in source.names if not _stored(tensors, name)]
    if missing:
        raise TrtspecError(
            f"{path}: {len(missing)} tensors of a {spec.model_type} model are missing, first {', '.join(missing[:4])}",
            "run `trtspec inspect` on the checkpoint, then download or convert it again",
        )
    for source in layout(spec):
        if spec.quant.format == "nvfp4" and _quantized(tensors, source.names[0]):
            quantized.install(model, source.parameter, source.names, tensors, activation, dtype, device)
        else:
            _install(model, source, tensors, spec, dtype, device)
    tensors.close()
    return model.eval().requires_grad_(False)


def _stored(tensors: LazyTensors, name: str) -> bool:
    packed = name.removesuffix(".weight") + ".weight_packed"
    return name in tensors or packed in tensors


def _quantized(tensors: LazyTensors, name: str) -> bool:
    return name.removesuffix("weight") + "weight_scale_2" in tensors


def _install(
    model: nn.Module, source: Source, tensors: LazyTensors, spec: ModelSpec, dtype: torch.dtype, device: str
) -> None:
    from trtspec.quant.decode import decoded

    parts = [decoded(tensors, spec, name) for name in source.names]
    owner, _, leaf = source.parameter.rpartition(".")
    module = model.get_submodule(owner)
    shape = getattr(module, leaf).shape
    if len(parts) == 1:
        value = parts[0]
    else:
        rows = sum(len(part) for part in parts)
        value = torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype)
        torch.cat(parts, out=value)
    if value.numel() != shape.numel():
        raise TrtspecError(
            f"{', '.join(source.names[:2])}: shape {tuple(value.shape)}, but config.json implies {tuple(shape)}",
            "config.json and weights do not belong together; download both again",
        )
    keep = torch.float32 if owner.endswith("mlp.gate") else dtype  # the router computes in float32
    setattr(module, leaf, nn.Parameter(value.view(shape).to(device=device, dtype=keep), requires_grad=False))
