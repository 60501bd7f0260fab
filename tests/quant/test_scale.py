"""Kimi-K2.5's 61 layers with pairs torn apart, byte for byte against ModelOpt.

Memory is measured while model and shards grow from half a gigabyte to four. Slow, so not by
default.
"""

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.command_line import inspected
from tests.json_files import read_json
from tests.quant.test_loaders import modules_of, ours
from tests.tiny import read_tensors
from tools.benchmarks.full_size_layer import make_layer
from trtspec.families.kimi_k2 import KIMI_K2
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

K25 = load_policy("k2.5")


def decoded(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The weight as compressed-tensors unpacks it."""
    if f"{module}.weight" in tensors:
        return tensors[f"{module}.weight"]
    shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
    codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape).to(torch.bfloat16)
    return (codes.view(shape[0], -1, 32) * tensors[f"{module}.weight_scale"].unsqueeze(-1)).view(
        shape
    )


@pytest.mark.slow
def test_all_61_layers_equal_modelopts_path(out, new_target):
    source = new_target(format="int4", layers=61, experts=8, shards=16, vision=True)
    place = read_json(source / "model.safetensors.index.json")["weight_map"]
    torn = [name for name in place if name.endswith("gate_proj.weight_packed")]
    torn = [name for name in torn if place[name] != place[name.replace("gate_proj", "up_proj")]]
    result = quantize_checkpoint(source, out, K25, ConversionOptions(workers=1))
    stored, got = read_tensors(source), read_tensors(out)
    modules = modules_of(got)
    assert len(modules) == result.quantized == 3 + 60 * (8 + 1) * 3 and len(torn) > 100
    for module in modules:
        weight = decoded(stored, module)
        group = [weight, *(decoded(stored, other) for other in KIMI_K2.partners(module))]
        scale_2 = torch.stack([member.abs().amax() for member in group]).amax().float() / (
            6.0 * 448.0
        )
        tensor, scale, _ = NVFP4QTensor.quantize(
            weight.clone(), 16, weights_scaling_factor_2=scale_2
        )
        assert torch.equal(got[f"{module}.weight"], tensor._quantized_data), module
        assert torch.equal(
            got[f"{module}.weight_scale"].view(torch.uint8), scale.view(torch.uint8)
        ), module
        assert torch.equal(got[f"{module}.weight_scale_2"], scale_2), module
        real = NVFP4QTensor(weight.shape, torch.bfloat16, got[f"{module}.weight"]).dequantize(
            torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
        )
        assert torch.equal(real, ours(got, module, torch.bfloat16)), module
    assert not inspected(out, source, 0).problems


def measured(source: Path, out: Path, found: Any) -> None:
    torch.set_num_threads(1)
    found.put(quantize_checkpoint(source, out, K25, ConversionOptions(workers=1)).peak_rss_bytes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("format", ["int4", "bf16"])
def test_memory_is_flat_from_shards_of_half_a_gigabyte_to_four(tmp_path, format, out):
    """Matrices of Kimi's own size; each conversion in a process of its own, whose peak it is."""
    spawn, peaks = multiprocessing.get_context("spawn"), []
    for experts in (12, 154) if format == "int4" else (3, 43):
        source, found = make_layer(tmp_path / "in", format, experts, 1), spawn.Queue()
        process = spawn.Process(target=measured, args=(source, out, found))
        process.start()
        peaks.append(found.get(timeout=3000))
        process.join()
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        print(f"{format}: one shard of {size / 1e9:.2f} GB, peak RSS {peaks[-1] / 2**20:.0f} MiB")
        shutil.rmtree(source)
        shutil.rmtree(out)
    assert max(peaks) < 2e9 and peaks[1] < peaks[0] + (256 << 20)  # at most one more set of buffers
