"""Packed weights against the weights themselves: the identity's product gives every one of them back, to the bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trtspec.models import precision
from trtspec.models.layers import Linear, RMSNorm
from trtspec.models.precision import MIN_ELEMENTS, has_native_bf16, pack
from trtspec.models.weights import prepare_for_decoding

IN, OUT = 256, 512
PACKS = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not PACKS, reason="FBGEMM is x86 only")


def stored_as_bf16(seed: int, exponent: int = 0) -> torch.Tensor:
    weight = (
        torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed)) * 0.02 * 2.0**exponent
    )
    return weight.to(torch.bfloat16).float()


@needs_fbgemm
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-90, 90))
def test_every_bf16_weight_comes_back(seed: int, exponent: int) -> None:
    weight = stored_as_bf16(seed, exponent)
    weight[0, 0] = 0.0
    weight[1, :8] = weight.abs().max() * 2.0 ** -torch.arange(20.0, 28.0)  # far below the largest
    packed = pack(weight)
    assert packed is not None
    assert torch.equal(packed.product(torch.eye(IN)), weight.t())


@needs_fbgemm
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16, 64])
def test_products_are_float32s(rows: int) -> None:
    weight, x = (
        stored_as_bf16(0),
        torch.randn(2, rows, IN, generator=torch.Generator().manual_seed(1)),
    )
    packed = pack(weight)
    assert packed is not None
    error = (packed.product(x) - x.double() @ weight.double().t()).abs()
    bound = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().t())
    assert (error <= bound).all()  # sums in FP16 would be off by a thousand times that


def test_what_would_not_be_exact_or_not_pay_is_left_alone() -> None:
    weight = stored_as_bf16(4)
    spread = weight.clone()
    spread[0, 0] = weight.abs().max() * 2.0**-40
    infinite = torch.where(weight == weight.max(), torch.inf, weight)
    trained = torch.randn(OUT, IN)  # 24 significant bits
    for refused in (
        spread,
        infinite,
        trained,
        torch.zeros(OUT, IN),
        weight[: MIN_ELEMENTS // OUT],
        weight.half(),
    ):
        assert pack(refused) is None
    assert (pack(weight.bfloat16()) is not None) == (PACKS and not has_native_bf16())


@pytest.mark.skipif(has_native_bf16() or not PACKS, reason="bfloat16 is native here")
@pytest.mark.parametrize("rows", [1, 4, 200])
def test_bfloat16_without_its_instructions_is_float32_rounded(rows: int) -> None:
    weight = stored_as_bf16(7).bfloat16()
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(8)).bfloat16()
    linear = Linear(IN, OUT)
    linear.weight.data = weight
    prepare_for_decoding(linear)
    with torch.no_grad():
        product = linear(x)
    assert product.dtype == torch.bfloat16
    exact = x.double() @ weight.double().t()
    assert (
        (product.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5
    ).all()  # half a unit in the last place


def test_a_prepared_linear_and_norm_are_the_same_function() -> None:
    generator = torch.Generator().manual_seed(9)
    for weight in (stored_as_bf16(5), torch.randn(OUT, IN, generator=generator) * 0.02):
        model = nn.Sequential(norm := RMSNorm(IN, 1e-5), linear := Linear(IN, OUT))
        linear.weight.data, norm.weight.data = weight, torch.rand(IN, generator=generator) + 0.5
        x = torch.randn(3, IN, generator=torch.Generator().manual_seed(6))
        plain = model(x).detach()
        prepare_for_decoding(model)
        assert torch.equal(linear.weight, weight)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-5)
            tiny = torch.full((1, IN), 1e-6)  # where epsilon decides
            torch.testing.assert_close(norm(tiny), F.rms_norm(tiny, (IN,), norm.weight, 1e-5))


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
