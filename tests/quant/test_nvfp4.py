"""NVFP4 bytes against ModelOpt's NVFP4QTensor, on every pattern that rounding could get wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from trtspec.errors import TrtspecError
from trtspec.quant import nvfp4

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def modelopt(weight: torch.Tensor, amax: torch.Tensor | None = None) -> nvfp4.NVFP4Tensor:
    scale_2 = None if amax is None else amax.float() / (6.0 * 448.0)
    tensor, scale, scale_2 = NVFP4QTensor.quantize(
        weight.clone(), 16, weights_scaling_factor_2=scale_2
    )
    return nvfp4.NVFP4Tensor(tensor._quantized_data, scale, scale_2)


def modelopt_dequantize(tensor: nvfp4.NVFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    wrapped = NVFP4QTensor(torch.Size(tensor.shape), dtype, tensor.packed)
    return wrapped.dequantize(
        dtype, scale=tensor.scale, double_scale=tensor.scale_2, block_sizes={-1: 16}
    )


def assert_same(got: nvfp4.NVFP4Tensor, expected: nvfp4.NVFP4Tensor) -> None:
    assert torch.equal(got.scale_2, expected.scale_2)
    assert torch.equal(got.scale.view(torch.uint8), expected.scale.view(torch.uint8))
    assert torch.equal(got.packed, expected.packed)


def assert_modelopts(weight: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    assert_same(nvfp4.quantize(weight, amax), modelopt(weight, amax))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_random_weights(dtype, spread):
    torch.manual_seed(0)
    rows = torch.exp2(
        spread * torch.randn(96, 1)
    )  # rows of very different size reach the clamped block scales
    weight = (torch.randn(96, 1024) * rows).clamp(-6e4, 6e4).to(dtype)
    assert_modelopts(weight)
    assert_modelopts(weight, weight.abs().max().float() * 1.7)


def around_the_bounds(steps: int) -> torch.Tensor:
    """All float32 within `steps` of each rounding bound and code, both signs: [n, 16].

    Each block has a 6.
    """
    points = torch.tensor(sorted({*nvfp4.E2M1_BOUNDS, *nvfp4.E2M1_VALUES[1:], 5.999999, 2.0**-20}))
    bits = points.view(torch.int32).unsqueeze(1) + torch.arange(
        -steps, steps + 1, dtype=torch.int32
    )
    values = bits.reshape(-1).view(torch.float32).clamp(max=6.0)
    values = torch.cat([values, -values])
    values = torch.cat([values, torch.zeros(-len(values) % 15)]).reshape(-1, 15)
    return torch.cat([values, torch.full((len(values), 1), 6.0)], dim=1)


def test_every_float_beside_a_tie():
    # amax 2688 makes scale_2 exactly 1 and the block scales 1, so that the quotients are these very
    # floats
    blocks = around_the_bounds(40)
    for weight in (blocks, torch.cat([blocks, torch.zeros(1, 16)])):
        assert_modelopts(weight, torch.tensor(2688.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_ties(dtype):
    ties = torch.tensor([*nvfp4.E2M1_BOUNDS, *nvfp4.E2M1_VALUES, 6.0], dtype=dtype)
    assert_modelopts(torch.stack([ties, -ties, ties.flip(0)]), torch.tensor(2688.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_tiny_negative_and_zero_blocks(dtype):
    weight = torch.randn(4, 64).to(dtype)
    weight[0, :16] = 0.0
    weight[1, 16:32] = -0.0
    weight[2, ::3] = -0.0
    weight[3, ::2] = -torch.finfo(dtype).tiny
    weight[3, 5] = torch.finfo(dtype).smallest_normal / 4
    assert_modelopts(weight)
    tensor = nvfp4.quantize(weight)
    assert int(tensor.scale.view(torch.uint8)[0, 0]) == 0x38 and not tensor.packed[0, :8].any()


@pytest.mark.parametrize(
    "magnitude", [2.0**-126, 2.0**-115, 2.0**-100, 2.0**-88, 2.0**100, 2.0**127]
)
def test_the_ends_of_the_range(magnitude):
    torch.manual_seed(2)
    for dtype in (torch.bfloat16, torch.float32):
        weight = (torch.rand(8, 64).sub(0.5) * magnitude).to(dtype)
        assert_modelopts(weight)


def test_values_above_the_given_amax_saturate():
    torch.manual_seed(3)
    weight = torch.randn(8, 64) * 1000
    assert_modelopts(weight, torch.tensor(1.0))


bits16 = st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32)


@given(bits16, st.sampled_from([torch.bfloat16, torch.float16]))
@settings(max_examples=300)
def test_any_bit_pattern(bits, dtype):
    weight = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).reshape(2, 16)
    weight = torch.where(weight.isfinite(), weight, 1.0)
    if weight.abs().max() > 0:
        assert_modelopts(weight)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32)
)
@settings(max_examples=300)
def test_any_float32(values):
    weight = torch.tensor(values, dtype=torch.float32).reshape(2, 16)
    if float(weight.abs().max() / 2688) > 0:
        assert_modelopts(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_all_zero_tensor_has_no_nan(dtype):
    tensor = nvfp4.quantize(torch.zeros(4, 32, dtype=dtype))
    assert float(tensor.scale_2) == float(torch.tensor(1.0) / 2688)
    assert (tensor.scale.view(torch.uint8) == 0x38).all() and not tensor.packed.any()
    assert not nvfp4.dequantize(tensor, torch.float32).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_refused(bad, dtype):
    weight = torch.ones(2, 32, dtype=dtype)
    weight[1, 3] = bad
    with pytest.raises(TrtspecError, match="NaN or infinity"):
        nvfp4.quantize(weight)


def test_flushed_denormals_change_nothing():
    torch.manual_seed(4)
    weight = torch.randn(16, 64).bfloat16()
    expected = nvfp4.quantize(weight)
    assert torch.set_flush_denormal(True)
    try:
        assert_same(nvfp4.quantize(weight), expected)
    finally:
        torch.set_flush_denormal(False)


def test_codes_times_scale_is_exact_and_splits_off_scale_2():
    torch.manual_seed(6)
    weight = torch.randn(32, 256) * torch.exp2(4 * torch.randn(32, 1))
    tensor = nvfp4.quantize(weight)
    split = nvfp4.codes_times_scale(tensor)
    exact = modelopt_dequantize(
        nvfp4.NVFP4Tensor(tensor.packed, tensor.scale, torch.tensor(1.0)), torch.float32
    )
    assert split.dtype == torch.bfloat16 and torch.equal(split.float(), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("calibrated", [1.0, 0.05, 3.0])
def test_activations_equal_modelopts_blocks(dtype, calibrated):
    """Activation blocks equal NVFP4QTensor there and back, with amax = input_scale * 2688.

    The product is in float32.
    """
    torch.manual_seed(7)
    x = torch.randn(3, 5, 64).to(dtype)
    x[0, 0, :16] = 0
    input_scale = x.abs().max().float() * calibrated / 2688
    values, scale = nvfp4.fake_quantize_activation(x, input_scale)
    expected, block, _ = NVFP4QTensor.quantize(
        x.reshape(-1, 64).float().clone(), 16, weights_scaling_factor_2=input_scale
    )
    tensor = nvfp4.NVFP4Tensor(expected._quantized_data, block, input_scale)
    assert values.shape == x.shape and values.dtype == torch.bfloat16
    exact = modelopt_dequantize(
        nvfp4.NVFP4Tensor(tensor.packed, tensor.scale, torch.tensor(1.0)), torch.float32
    )
    assert torch.equal(values.float().reshape(-1, 64), exact)
    assert torch.equal(scale, input_scale)


def test_round_to_e2m1_beside_every_tie():
    values = around_the_bounds(40)
    codes = nvfp4.e2m1_codes(values)
    table = torch.tensor(nvfp4.E2M1_VALUES)
    expected = table[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    assert torch.equal(nvfp4.round_to_e2m1(values), expected)
