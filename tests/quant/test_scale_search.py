"""Block scales of least squared error against ModelOpt's calibrator: candidates, sum, choice."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator

from tests.quant.modelopt_oracle import static_block_quantize
from tests.quant.stored_rows import rows_of
from trtspec.formats import WeightFormat
from trtspec.quant import nvfp4
from trtspec.quant.decode import TorchPacker
from trtspec.quant.native import Scaling
from trtspec.quant.shards import choose_packer


def modelopts_codes(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """uint8 [n]: E4M3 codes of the block scales that ModelOpt's sweep chooses."""
    blocks = weight.reshape(-1, 16)
    calibrator = NVFP4MSECalibrator(
        amax=blocks.abs().amax(-1, keepdim=True).float(), axis=0, global_amax=amax,
        quant_func=lambda x, candidate: static_block_quantize(x, candidate, amax),
    )  # fmt: skip
    calibrator.collect(blocks)
    chosen = calibrator.compute_amax().reshape(-1) / amax * 448.0
    return chosen.to(torch.float8_e4m3fn).view(torch.uint8)


def assert_modelopts_choice(weight: torch.Tensor, amax: float | None = None) -> None:
    scaling = Scaling.of(float(weight.abs().amax()) if amax is None else amax)
    largest, rows = torch.tensor(scaling.amax), rows_of(WeightFormat.BF16, weight)
    expected = modelopts_codes(weight, largest)
    for packer in (TorchPacker("mse"), choose_packer("mse")):
        packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
        scale = torch.empty(weight.shape[0], weight.shape[1] // 16, dtype=torch.uint8)
        packer.pack(rows, scaling, packed.numpy(), scale.numpy())
        assert torch.equal(scale.reshape(-1), expected), packer.name
        # the values are packed under the chosen scales as under any others
        divisor = (scale.view(torch.float8_e4m3fn).float() * scaling.scale_2).repeat_interleave(
            16, -1
        )
        codes = nvfp4.e2m1_codes(weight.float() / divisor)
        assert torch.equal(packed, codes[:, 0::2] | (codes[:, 1::2] << 4)), packer.name


def grid(generator: torch.Generator, steps: int, exponents: tuple[int, int]) -> torch.Tensor:
    """Small integers times a power of two for each block: quotients that fall on ties."""
    values = torch.randint(-steps, steps + 1, (16, 128), generator=generator).float()
    return (
        values
        * 2.0 ** torch.randint(*exponents, (16, 8), generator=generator).repeat_interleave(16, 1)
    ).bfloat16()


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 4.0]))
@settings(max_examples=10)
def test_random_weights(seed, tail):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 128, generator=generator)
    assert_modelopts_choice(
        (weight * torch.exp2(tail * torch.randn(16, 128, generator=generator))).bfloat16()
    )


@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 8, 24]),
    st.sampled_from([None, 2688.0, 1344.0 * 3, 7.0 * 2**6]),
)
@settings(max_examples=15)
def test_ties(seed, steps, amax):
    weight = grid(torch.Generator().manual_seed(seed), steps, (-12, 4))
    assert_modelopts_choice(weight, None if amax is None else max(amax, float(weight.abs().amax())))


@given(st.integers(0, 2**32))
@settings(max_examples=8)
def test_int4_grids(seed):
    """Codes from -8 to 7 times BF16 scales of groups of 32, rounded as compressed-tensors does."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (16, 4, 32), generator=generator).bfloat16()
    scales = (torch.rand(16, 4, 1, generator=generator) * 0.01).bfloat16()
    assert_modelopts_choice((codes * scales).reshape(16, 128))


@pytest.mark.parametrize(
    "kind", ["sparse", "one hot block", "zero blocks", "huge", "tiny", "denormal beside large"]
)
def test_extremes(kind):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(16, 128, generator=generator)
    if kind == "sparse":
        weight *= torch.rand(16, 128, generator=generator) < 0.08
    elif kind == "one hot block":
        weight[3, 16:32] *= 1e4
    elif kind == "zero blocks":
        weight[:, 16:48] = 0
    elif kind == "huge":
        weight *= 5e37
    elif kind == "tiny":
        weight *= 1e-6  # ModelOpt 0.47 takes maxima below 4e-7 for zero, 0.48 does not
    else:
        weight[1:] *= 1e-39
    assert_modelopts_choice(weight.bfloat16())


def test_a_tensor_of_zeros_keeps_scales_of_one():
    """ModelOpt divides zero by zero there; see nvfp4.py."""
    for packer in (TorchPacker("mse"), choose_packer("mse")):
        packed, scale = torch.ones(2, 16, dtype=torch.uint8), torch.empty(2, 2, dtype=torch.uint8)
        rows = rows_of(WeightFormat.BF16, torch.zeros(2, 32).bfloat16())
        zeros = packer.pack(rows, Scaling.of(0.0), packed.numpy(), scale.numpy())
        assert zeros == 4 and bool((scale == nvfp4.CODE_OF_ONE).all()) and not bool(packed.any())


def test_the_order_of_the_sum_is_torchs():
    """What the C kernel relies on: PyTorch adds sixteen floats as eight sums of two."""
    squares = torch.rand(4096, 16, generator=torch.Generator().manual_seed(0)) ** 8
    total = torch.zeros(4096)
    for low, high in zip(squares[:, :8].unbind(-1), squares[:, 8:].unbind(-1), strict=True):
        total += low + high
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert torch.equal(total, squares.sum(-1))
    else:
        warnings.warn(
            "PyTorch adds in another order on this processor; near-ties may differ", stacklevel=1
        )
