"""Our files against ModelOpt's own export of the same model, tensor by tensor, and our W4A4 against its fake-quant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from safetensors.torch import load_file, save_file

from tests.tiny import make_target
from trtspec.quant import nvfp4
from trtspec.quant.conversion import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint

ROOT = Path(__file__).parents[2]


def modelopt(mode: str, source: Path, config: str, out: Path) -> dict[str, torch.Tensor]:
    """Runs the oracle on a copy, because it has to rewrite model_type for transformers."""
    copy = out.with_name(f"{out.name}-source")
    shutil.copytree(source, copy)
    command = [sys.executable, "-m", "tests.quant.modelopt_oracle", mode, str(copy), config, str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {name: tensor for file in sorted(out.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("format", "nested", "config", "policy"),
    [
        ("bf16", False, "NVFP4_MLP_ONLY_CFG", "k2.5"),
        ("bf16", True, "NVFP4_EXPERTS_ONLY_CFG", "k2.6"),
        pytest.param("int4", False, "NVFP4_MLP_ONLY_CFG", "k2.5", marks=pytest.mark.slow),
        pytest.param("bf16", False, "NVFP4_EXPERTS_ONLY_CFG", "k2.6", marks=pytest.mark.slow),
    ],
)
def test_every_tensor_equals_modelopts_export(tmp_path, format, nested, config, policy):
    source = make_target(tmp_path / "in", format=format, nested=nested, layers=3, shards=3)
    theirs = modelopt("export", source, config, tmp_path / "modelopt")
    if nested:  # transformers adds a random vision tower, which the source does not have
        theirs = {name: tensor for name, tensor in theirs.items() if name.startswith("language_model.")}
    scales = tmp_path / "scales.safetensors"
    save_file({name: tensor for name, tensor in theirs.items() if name.endswith("input_scale")}, scales)
    quantize_checkpoint(source, tmp_path / "out", load_policy(policy), ConversionOptions(input_scales=scales))
    ours = {n: t for file in sorted((tmp_path / "out").glob("*.safetensors")) for n, t in load_file(file).items()}
    assert set(ours) == set(theirs)
    quantized = sum(name.endswith("weight_scale_2") for name in ours)
    assert quantized == {"k2.5": 3 + 2 * 15, "k2.6": 2 * 12}[policy]
    different = [
        name
        for name, tensor in ours.items()
        if tensor.dtype != theirs[name].dtype
        or not torch.equal(tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
    ]
    assert different == []


def test_w4a4_equals_modelopts_fake_quant_forward(tmp_path):
    source = make_target(tmp_path / "in", nested=False, layers=3)
    seen = modelopt("forward", source, "NVFP4_MLP_ONLY_CFG", tmp_path / "modelopt")
    tensors = {n: t for file in sorted(source.glob("*.safetensors")) for n, t in load_file(file).items()}
    modules = sorted({name.removesuffix(".x") for name in seen if name.endswith(".x")})
    assert len(modules) == 9  # dense layer 0 and two shared experts; routed experts are fused
    for module in modules:
        x, y = seen[f"{module}.x"], seen[f"{module}.y"]
        weight = nvfp4.quantize(tensors[f"{module}.weight"], seen[f"{module}.weight_amax"])
        values, input_scale = nvfp4.fake_quantize_activation(x, seen[f"{module}.input_amax"] / 2688)
        product = values.float() @ nvfp4.codes_times_scale(weight).float().T
        ours = product * (input_scale * weight.scale_2)
        assert (ours - y).abs().max() <= 2e-6 * y.abs().max(), module
        plain = x @ tensors[f"{module}.weight"].float().T
        assert (plain - y).norm() > 0.05 * y.norm()  # the comparison sees quantization at all


def test_compressed_tensors_reads_the_same_values(tmp_path):
    """`weight_global_scale` there is the reciprocal of weight_scale_2; packing and block scales are the same."""
    tensor = nvfp4.quantize(torch.randn(48, 256).bfloat16())
    rows, columns = tensor.shape
    codes = unpack_fp4_from_uint8(tensor.packed, rows, columns, dtype=torch.float32)
    scale = (tensor.scale.float() * tensor.scale_2).repeat_interleave(16, dim=1)
    assert torch.equal(nvfp4.dequantize(tensor, torch.float32), codes * scale)
