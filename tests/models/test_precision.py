"""The default type is the one that the hardware multiplies."""

from pathlib import Path

import pytest
import torch

from trtspec.models import precision

CPUINFO = Path("/proc/cpuinfo")
FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


@pytest.mark.skipif(not CPUINFO.is_file(), reason="needs /proc/cpuinfo")
def test_the_kernel_names_the_same_capability() -> None:
    lines = CPUINFO.read_text().splitlines()
    flags = {
        word
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for word in line.split()
    }
    assert precision.has_native_bf16("cpu") == bool(flags & FLAGS)


def test_default_follows_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag, expected in (("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda flag=flag: {flag: True}, raising=False
        )
        assert precision.default_dtype("cpu") == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device: (7 if torch.device(device).index else 8, 0),
    )
    assert [precision.has_native_bf16(device) for device in ("cuda", "cuda:1")] == [True, False]


def test_no_gpu_no_claim() -> None:
    assert precision.has_native_bf16("cuda") == (
        torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
    )
    assert precision.default_dtype("meta") == torch.float32
