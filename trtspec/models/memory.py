"""What a loaded target, a head and their caches take on a device, from their headers, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.errors import MissingDependency, UsageError
from trtspec.models.kimi import KimiModel
from trtspec.models.packed import through_float32
from trtspec.models.sharding import WHOLE, Sharding
from trtspec.quant.workers import usable_memory
from trtspec.specs import HeadSpec, ModelSpec

PACKED_SHARE = 0.5  # of a float32 weight on a CPU: its copy for products of few rows (models/packed.py)


def check_device(device: str, ranks: int = 1) -> None:
    """Raises MissingDependency for devices that are not here, UsageError for one that does not exist."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device {device} is neither cpu nor cuda", "use cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MissingDependency(f"--device {device}: torch sees no GPU", "use --device cpu, or install CUDA")
    if ranks > 1 and kind == "cuda":
        if device != "cuda":
            raise UsageError(f"--tp-size {ranks} takes the first {ranks} GPUs, not {device}", "use --device cuda")
        if ranks > torch.cuda.device_count():
            raise MissingDependency(
                f"--tp-size {ranks}: torch sees {torch.cuda.device_count()} GPUs", "use a smaller --tp-size"
            )


def free_bytes(device: str) -> int:
    """Bytes that this process may still take on `device`: cgroup limits count, and so do other processes of a GPU."""
    if device == "cpu":
        return usable_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def target_bytes(path: Path, spec: ModelSpec, dtype: torch.dtype, device: str, sharding: Sharding = WHOLE) -> int:
    """Of a rank's part of a loaded target: NVFP4 weights stay as they are stored, all others become `dtype`."""
    if spec.quant.format.is_fp4:
        return sum(file.stat().st_size for file in path.glob("*.safetensors")) // sharding.size
    with torch.device("meta"):
        model = KimiModel(spec, sharding=sharding)
    elements = sum(parameter.numel() for parameter in model.parameters())
    packed = device == "cpu" and (dtype == torch.float32 or through_float32(dtype))
    return int(elements * (dtype.itemsize + (4 * PACKED_SHARE if packed else 0)))


def head_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Of a loaded head, all tensors as `dtype`."""
    return sum(info.numel for info in checkpoint.tensors.values()) * dtype.itemsize


def cache_token_bytes(spec: ModelSpec, head: HeadSpec | None, dtype: torch.dtype, *, fp8: bool = False) -> int:
    """Of the caches, per token: an entry in each layer of the target, FP8 where that or the checkpoint asks for it, and
    the head's."""
    target = spec.kv_elements_per_token * (1 if fp8 or spec.quant.kv_cache else dtype.itemsize)
    return target + (head.kv_elements_per_token * dtype.itemsize if head else 0)
