"""The default compute type: bfloat16 if the hardware multiplies it, else float32."""

from __future__ import annotations

import torch

# Keys of torch.cpu.get_capabilities() for bfloat16 products: AVX-512 BF16 and AMX on x86, the bf16
# and SVE bf16 extensions on Arm.
NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def has_native_bf16(device: str | torch.device = "cpu") -> bool:
    """Whether `device` multiplies bfloat16 matrices in hardware.

    A CPU without such instructions computes bfloat16 by a generic kernel. On an AVX2 CPU, products
    with 256 x 2048 weights took longer than in float32: 1.5 times for 1 token, 9 times for 64
    tokens, 12 times for 384 tokens.
    """
    device_type = torch.device(device).type
    if device_type == "cpu":
        if hasattr(torch.cpu, "get_capabilities"):
            capabilities = torch.cpu.get_capabilities()
            return any(bool(capabilities.get(name)) for name in NATIVE_BF16)
        return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.10
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return False


def default_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """Returns bfloat16 if `device` multiplies it in hardware, else float32."""
    return torch.bfloat16 if has_native_bf16(device) else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
