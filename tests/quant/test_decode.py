"""INT4 against compressed-tensors, FP8 blocks by definition, every format by plain names."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import make_target
from tests.tiny_formats import pack_fp8_block, pack_int4
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.formats import stored_format
from trtspec.quant.decode import decoded, dequantize_fp8_block, dequantize_int4

PREFIX = "language_model.model.layers.1.mlp"


@given(st.integers(1, 80), st.sampled_from([1, 2, 5, 224]), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_int4_equals_compressed_tensors(rows, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    columns = 32 * groups
    packed = torch.randint(
        -(2**31), 2**31, (rows, columns // 8), generator=generator, dtype=torch.int64
    ).int()
    scale = torch.randn(rows, groups, generator=generator).bfloat16()
    codes = unpack_from_int32(packed, 4, torch.Size([rows, columns]))
    expected = (codes.to(torch.bfloat16).view(rows, groups, 32) * scale.unsqueeze(-1)).view(
        rows, columns
    )
    assert torch.equal(dequantize_int4(packed, scale, torch.tensor([rows, columns])), expected)


def test_int4_parts_that_do_not_fit_are_refused():
    parts = pack_int4(torch.randn(8, 64).bfloat16())
    with pytest.raises(TrtspecError, match="do not belong together"):
        dequantize_int4(parts["weight_packed"][:4], parts["weight_scale"], parts["weight_shape"])


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (130, 200), (5, 300), (300, 7), (300, 7168)]
)
def test_fp8_blocks_equal_the_definition(shape):
    parts = pack_fp8_block(torch.randn(shape).bfloat16())
    got = dequantize_fp8_block(parts["weight"], parts["weight_scale_inv"])
    rows, columns = torch.meshgrid(*(torch.arange(size) // 128 for size in shape), indexing="ij")
    expected = (parts["weight"].float() * parts["weight_scale_inv"][rows, columns]).bfloat16()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block", "nvfp4"])
def test_a_weight_by_its_plain_name_in_every_format(tmp_path, format):
    plain = LazyTensors(Checkpoint.open(make_target(tmp_path / "bf16", layers=2, shards=3)))
    stored = LazyTensors(
        Checkpoint.open(make_target(tmp_path / format, format=format, layers=2, shards=3))
    )
    name = f"{PREFIX}.experts.3.down_proj.weight"
    assert stored_format(stored.checkpoint.tensors, name.removesuffix(".weight")) == format
    weight, expected = decoded(stored, name), plain[name]
    assert weight.dtype == torch.bfloat16 and weight.shape == expected.shape
    error = float((weight - expected).float().norm() / expected.float().norm())
    assert error <= {"bf16": 0.0, "int4": 0.13, "fp8-block": 0.03, "nvfp4": 0.11}[format]
    bias = f"{PREFIX}.gate.e_score_correction_bias"
    assert torch.equal(decoded(stored, bias), plain[bias])


def test_a_missing_scale_is_named(tmp_path):
    tensors = LazyTensors(Checkpoint.open(make_target(tmp_path, format="int4", layers=2)))
    name = f"{PREFIX}.experts.0.up_proj.weight"
    del tensors.checkpoint.tensors[name + "_scale"]
    with pytest.raises(TrtspecError, match="up_proj.weight_scale is missing"):
        decoded(tensors, name)
