"""The C kernel and torch give ModelOpt's bytes; the scale search finds brute force's scales."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.quant.stored_rows import rows_of
from tests.tiny_formats import pack_fp8_block, pack_int4
from trtspec.errors import MissingDependency, UsageError
from trtspec.formats import TINIEST_AMAX, WeightFormat
from trtspec.machine import check_device
from trtspec.quant import native, nvfp4
from trtspec.quant.decode import TorchPacker, dequantize_fp8_block
from trtspec.quant.native import NativePacker, Packer, Rows, Scaling, packable_rows
from trtspec.quant.shards import choose_packer

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, native.COMPILERS)), reason="no C compiler here"
)


def kernel_for(march: list[str], directory: Path) -> ctypes.CDLL:
    """The kernel compiled for another processor than this one."""
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)))
    flags = [flag for flag in native.FLAGS if not flag.startswith("-march")]
    subprocess.run(
        [compiler, *flags, *march, "-o", directory / "kernel.so", native.SOURCE], check=True
    )
    return native.open_kernel(directory / "kernel.so")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> ctypes.CDLL:
    """As a processor without AVX2 gets it."""
    return kernel_for([], tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def narrow_mse(tmp_path_factory) -> NativePacker:
    """As a processor with AVX2 and without AVX-512 gets it."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2 here")
    return NativePacker(
        kernel_for(["-mavx2"], tmp_path_factory.mktemp("kernel")), "mse", lambda: TorchPacker("mse")
    )


@pytest.fixture(scope="module")
def portable(kernel) -> NativePacker:
    return NativePacker(kernel, "max", TorchPacker)


@pytest.fixture(scope="module")
def portable_mse(kernel) -> NativePacker:
    return NativePacker(kernel, "mse", lambda: TorchPacker("mse"))


@functools.cache
def packers(weight_scales: str = "max") -> list[Packer]:
    return [TorchPacker(weight_scales), choose_packer(weight_scales)]


def packed(
    packer: Packer, rows: Rows, amax: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    count, columns = rows.shape
    rows = packable_rows(rows, packer)
    target = (
        torch.empty(count, columns // 2, dtype=torch.uint8),
        torch.empty(count, columns // 16, dtype=torch.uint8),
    )
    scaling = Scaling.of(packer.amax(rows) if amax is None else amax)
    zeros = packer.pack(rows, scaling, *(each.numpy() for each in target))
    return *target, zeros


def assert_modelopts_bytes(rows: Rows, packer: Packer, amax: float | None = None) -> None:
    weight = TorchPacker().decoded(rows)
    bits = torch.empty(rows.shape, dtype=torch.int16)
    packer.decode(rows, bits.numpy().view("u2"))
    assert torch.equal(bits, weight.view(torch.int16))
    largest = float(weight.abs().amax())
    assert packer.amax(packable_rows(rows, packer)) == largest
    scale_2 = nvfp4.scale_2_of(torch.tensor(largest if amax is None else amax))
    tensor, scale, _ = NVFP4QTensor.quantize(weight.clone(), 16, weights_scaling_factor_2=scale_2)
    codes, scales, zeros = packed(packer, rows, amax)
    assert torch.equal(scales, scale.view(torch.uint8)) and torch.equal(
        codes, tensor._quantized_data
    )
    assert zeros == int((weight.view(-1, 16) == 0).all(-1).sum())


def bf16_of(bits: list[int]) -> torch.Tensor:
    weight = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.where(weight.isfinite(), weight, 1.0)


bits16 = st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64)


@NEEDS_COMPILER
@given(bits16, st.floats(1, 4, width=32))
@settings(max_examples=100)
def test_any_bf16_bits(portable, bits, more):
    rows = rows_of(WeightFormat.BF16, bf16_of(bits).reshape(2, 32))
    amax = TorchPacker().amax(rows)
    for packer in (*packers(), portable):
        assert_modelopts_bytes(rows, packer)
        if amax * more < 3e38:
            assert_modelopts_bytes(rows, packer, float(torch.tensor(amax * more)))


@NEEDS_COMPILER
@given(st.lists(st.integers(0, 15), min_size=128, max_size=128), bits16)
@settings(max_examples=100)
def test_any_int4_codes_and_scales(portable, codes, bits):
    """Every packer takes signed zero, subnormal and huge scales, and refuses BF16 overflow."""
    words = (torch.tensor(codes, dtype=torch.int64).reshape(2, 8, 8) << (4 * torch.arange(8))).sum(
        -1
    )
    values = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    rows = rows_of(WeightFormat.INT4, values, bf16_of(bits[:4]).reshape(2, 2))
    for packer in (*packers(), portable):
        if TorchPacker().decoded(rows).isfinite().all():
            assert_modelopts_bytes(rows, packer)
        else:
            assert packer.amax(packable_rows(rows, packer)) == float("inf")


@NEEDS_COMPILER
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_int4_matrices_of_any_group(portable, group, spread):
    torch.manual_seed(0)
    parts = pack_int4(torch.randn(96, 512) * torch.exp2(spread * torch.randn(96, 1)))
    scale = parts["weight_scale"].repeat_interleave(2, 1)[:, :: group // 16].contiguous()
    rows = rows_of(WeightFormat.INT4, parts["weight_packed"], scale)
    for packer in (*packers(), portable):
        for amax in (None, 3e3, None):  # tables of another scale_2 are not used again
            assert_modelopts_bytes(rows, packer, amax)


@NEEDS_COMPILER
@pytest.mark.parametrize("shape", [(128, 256), (200, 336), (64, 16)])
def test_fp8_blocks(portable, shape):
    torch.manual_seed(1)
    parts = pack_fp8_block(torch.randn(shape).bfloat16())
    parts["weight"].view(torch.uint8)[0, :16] = (
        torch.arange(16) * 0x11 % 0x7F
    )  # subnormals among them
    rows = rows_of(WeightFormat.FP8_BLOCK, *parts.values())
    assert torch.equal(TorchPacker().decoded(rows), dequantize_fp8_block(*parts.values()))
    for packer in (*packers(), portable):
        assert_modelopts_bytes(rows, packer)
    parts["weight"].view(torch.uint8)[3, 5] = 0x7F
    assert all(
        not torch.isfinite(torch.tensor(packer.amax(packable_rows(rows, packer))))
        for packer in packers()
    )


@NEEDS_COMPILER
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen(portable, bad):
    weight, parts = torch.ones(64, 64).bfloat16(), pack_int4(torch.ones(64, 64))
    weight[50, 3] = parts["weight_scale"][50, 1] = bad
    parts["weight_packed"][50, 4:] = -0x77777778  # all codes 8, which is zero: 0 * NaN
    for packer in (*packers(), portable):
        for rows in (
            rows_of(WeightFormat.BF16, weight),
            rows_of(WeightFormat.INT4, parts["weight_packed"], parts["weight_scale"]),
        ):
            assert not torch.isfinite(torch.tensor(packer.amax(packable_rows(rows, packer))))


@NEEDS_COMPILER
def test_errors_are_those_of_the_dequantized_rows():
    torch.manual_seed(2)
    for rows in (
        rows_of(WeightFormat.BF16, torch.randn(64, 256).bfloat16()),
        rows_of(WeightFormat.INT4, *list(pack_int4(torch.randn(64, 256)).values())[:2]),
    ):
        weight, scaling = TorchPacker().decoded(rows).double(), Scaling.of(TorchPacker().amax(rows))
        codes, scales, _ = packed(TorchPacker(), rows)
        real = nvfp4.dequantize(
            nvfp4.NVFP4Tensor(
                codes, scales.view(torch.float8_e4m3fn), torch.tensor(scaling.scale_2)
            ),
            torch.float32,
        )
        expected = (float((real.double() - weight).square().sum()), float(weight.square().sum()))
        for packer in packers():
            assert packer.errors(rows, scaling, codes.numpy(), scales.numpy()) == pytest.approx(
                expected, rel=1e-5
            )


@NEEDS_COMPILER
@given(bits16)
@example(
    [0] * 63 + [0x1380]
)  # 2^-88: every error squared is zero, and the smallest scale is as good as any
@example([0] * 47 + [1] + [0] * 15 + [0x4C60])  # and so in a block that vanishes beside a large one
@settings(max_examples=20)
def test_mse_bytes_are_the_same_in_c_and_torch(portable_mse, bits):
    rows = rows_of(WeightFormat.BF16, bf16_of(bits).reshape(2, 32))
    assume(not 0 < TorchPacker().amax(rows) < TINIEST_AMAX)  # refused
    results = [packed(packer, rows) for packer in (*packers("mse"), portable_mse)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:2], other[:2], strict=True))


@NEEDS_COMPILER
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 40]), st.sampled_from([0.0, 1.0, 6.0]))
@settings(max_examples=25)
def test_mse_of_int4_is_that_of_its_bf16_values(portable_mse, narrow_mse, seed, variety, spread):
    """In every build, the search by classes finds the scales of the search by values.

    Scales of either sign, zero ones, blocks of zeros, few and many classes.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (32, 16, 8), generator=generator)
    codes[3, 4:8] = 8
    values = (codes.to(torch.int64) << (4 * torch.arange(8))).sum(-1)
    values = torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)
    pool = torch.randn(variety, generator=generator) * torch.exp2(
        spread * torch.randn(variety, generator=generator)
    )
    scale = pool[torch.randint(0, variety, (32, 4), generator=generator)].bfloat16()
    scale[5, 1], scale[6, 2] = 0.0, -0.0
    rows = rows_of(WeightFormat.INT4, values, scale)
    plain = rows_of(WeightFormat.BF16, TorchPacker().decoded(rows))
    expected = packed(TorchPacker("mse"), plain)
    for packer in (choose_packer("mse"), portable_mse, narrow_mse):
        for source in (rows, plain, rows):
            result = packed(packer, source)
            assert all(torch.equal(a, b) for a, b in zip(expected[:2], result[:2], strict=True))
            assert result[2] == expected[2]


def test_mse_costs_less_than_the_maximum_above_all_from_int4():
    torch.manual_seed(3)
    weight = torch.randn(64, 1024).bfloat16()
    for rows, most in (
        (rows_of(WeightFormat.BF16, weight), 0.9),
        (rows_of(WeightFormat.INT4, *list(pack_int4(weight).values())[:2]), 0.75),
    ):
        error = {}
        for weight_scales in ("max", "mse"):
            packer = choose_packer(weight_scales)
            codes, scales, _ = packed(packer, rows)
            scaling = Scaling.of(packer.amax(rows))
            error[weight_scales] = (
                packer.errors(rows, scaling, codes.numpy(), scales.numpy())[0] ** 0.5
            )
        assert error["mse"] < most * error["max"]


def test_the_kernel_can_be_chosen(monkeypatch):
    native.load_kernel.cache_clear()
    try:
        monkeypatch.setenv("TRTSPEC_KERNEL", "torch")
        assert choose_packer().name == "torch"
        monkeypatch.setenv("TRTSPEC_KERNEL", "fortran")
        native.load_kernel.cache_clear()
        with pytest.raises(UsageError, match="fortran is not torch"):
            native.load_kernel()
        monkeypatch.delenv("TRTSPEC_KERNEL")
        monkeypatch.setenv("PATH", "")
        native.load_kernel.cache_clear()
        assert choose_packer().name == "torch"  # no compiler on PATH: no kernel, no complaint
    finally:
        native.load_kernel.cache_clear()


@NEEDS_COMPILER
def test_flushed_denormals_turn_to_torch():
    assert torch.set_flush_denormal(True)
    try:
        assert choose_packer().name == "torch"
    finally:
        torch.set_flush_denormal(False)
    assert choose_packer().name == "c"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("weight_scales", ["max", "mse"])
def test_a_gpu_gives_the_same_bytes(weight_scales):
    torch.manual_seed(4)
    weight = torch.randn(256, 1024).bfloat16()
    for rows in (
        rows_of(WeightFormat.BF16, weight),
        rows_of(WeightFormat.INT4, *list(pack_int4(weight).values())[:2]),
        rows_of(WeightFormat.FP8_BLOCK, *pack_fp8_block(weight).values()),
    ):
        expected, got = (
            packed(choose_packer(weight_scales, device), rows) for device in ("cpu", "cuda")
        )
        assert all(torch.equal(a, b) for a, b in zip(expected[:2], got[:2], strict=True))


def test_without_a_gpu_the_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(MissingDependency, match="sees no GPUs"):
        check_device("cuda")


@pytest.mark.parametrize("weight_scales", ["max", "mse"])
def test_the_proof_is_what_torch_makes_of_it(weight_scales):
    """What the compiled kernel is held against in every process, without importing torch."""
    assert native.proof_of(TorchPacker(weight_scales)) == native.PROOFS[weight_scales]


@given(st.one_of(st.floats(0, 2.0**127, width=32), st.floats(0, 2.0**-120, width=32)))
def test_scales_without_torch_are_the_float32_ones(amax):
    value = torch.tensor(amax, dtype=torch.float32)
    assert Scaling.of(amax).scale_2 == float(nvfp4.scale_2_of(value))
    if amax >= TINIEST_AMAX:
        assert native._search_unit(amax) == float(nvfp4.search_unit(value))
