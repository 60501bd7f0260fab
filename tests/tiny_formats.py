"""The four weight formats of published Kimi checkpoints, in plainest form, for tests/tiny.py."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

INT4_CONFIG: dict[str, Any] = json.loads(
    Path(__file__).with_name("tiny_files").joinpath("int4.json").read_text()
)
FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def pack_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Packs as compressed-tensors: group 32, symmetric, eight values plus 8 in an int32.

    Low bits come first.
    """
    rows, columns = weight.shape
    groups = F.pad(weight.float(), (0, -columns % 32)).unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-6).bfloat16()
    codes = (groups / scale.float()).round().clamp(-8, 7).long().flatten(1)
    codes = codes[:, :columns].unflatten(1, (-1, 8)) + 8
    packed = (codes << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(-1).contiguous(),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }


def pack_fp8_block(weight: torch.Tensor, block: int = 128) -> dict[str, torch.Tensor]:
    """FP8 e4m3 with a float32 scale per 128x128 block, edges ragged.

    DeepSeek and Kimi-K2-Instruct store it so.
    """
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block), -(-columns // block))
    packed = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = weight[i * block : (i + 1) * block, j * block : (j + 1) * block].float()
            scales[i, j] = tile.abs().max() / 448
            packed[i * block : (i + 1) * block, j * block : (j + 1) * block] = (
                tile / scales[i, j]
            ).to(torch.float8_e4m3fn)
    return {"weight": packed, "weight_scale_inv": scales}


def pack_nvfp4(weight: torch.Tensor, amax: torch.Tensor) -> dict[str, torch.Tensor]:
    """ModelOpt's NVFP4 tensors of a linear, in the plainest way; gate and up share `amax`."""
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows, columns // 16, 16)
    scale_2 = amax.float() / (6.0 * 448.0)
    scale = blocks.abs().amax(-1) / (6.0 * scale_2)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * scale_2).unsqueeze(-1)
    magnitude, code = scaled.abs(), torch.zeros(blocks.shape, dtype=torch.uint8)
    for index, bound in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude >= bound) if index % 2 else (magnitude > bound)
    code = (code | ((scaled < 0).to(torch.uint8) << 3)).reshape(rows, columns)
    return {
        "weight": code[:, 0::2] | (code[:, 1::2] << 4),
        "weight_scale": scale,
        "weight_scale_2": scale_2,
        "input_scale": torch.tensor(1.0),
    }


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def quantize_tensors(tensors: dict[str, torch.Tensor], format: str) -> dict[str, torch.Tensor]:
    """Stores the linears that published checkpoints of this format quantize; others stay."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, packed = _stem(name), None
        linear = name.endswith(("_proj.weight", "_mqa.weight"))
        if format == "int4" and linear and ".mlp.experts." in name:
            packed = pack_int4(tensor)
        elif format == "fp8-block" and linear:
            packed = pack_fp8_block(tensor)
        elif format == "nvfp4" and linear and ".mlp." in name:
            parent, _, leaf = stem.rpartition(".")
            pair = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(leaf)
            amax = tensor.abs().max()
            if pair:
                amax = torch.maximum(amax, tensors[f"{parent}.{pair}.weight"].abs().max())
            packed = pack_nvfp4(tensor, amax)
        if packed is None:
            stored[name] = tensor
        else:
            stored |= {f"{stem}.{suffix}": value for suffix, value in packed.items()}
    return stored


def nvfp4_config(layers: int, prefix: str) -> dict[str, Any]:
    """`quantization_config` of Kimi-K2.5's NVFP4 checkpoint: every MLP, no attention."""
    ignore = sorted(
        [
            f"{prefix}lm_head",
            *(f"{prefix}model.layers.{layer}.self_attn*" for layer in range(layers)),
        ]
        + (["mm_projector*", "vision_tower*"] if prefix else [])
    )
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {
            "group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        },
        "ignore": ignore,
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "quant_method": "modelopt",
    }


def hf_quant_config(block: dict[str, Any]) -> dict[str, Any]:
    return {
        "producer": block["producer"],
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": block["ignore"],
        },
    }
