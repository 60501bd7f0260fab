"""Who can load what `quantize` writes.

ModelOpt's and compressed-tensors' dequantization of every tensor, transformers logits beside the
reference model's.
"""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.json_files import read_json, write_json
from tests.models.test_k2 import prompts, transformers_logits
from tests.tiny import read_tensors, write_tensors
from trtspec.models.weights import load_target
from trtspec.quant import nvfp4
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

Tensors = dict[str, torch.Tensor]


def modules_of(tensors: Tensors) -> list[str]:
    return [
        name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")
    ]


def ours(tensors: Tensors, module: str, dtype: torch.dtype) -> torch.Tensor:
    parts = (tensors[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
    return nvfp4.dequantize(nvfp4.NVFP4Tensor(*parts), dtype)


def as_compressed_tensors(tensors: Tensors, module: str) -> Tensors:
    """Their names: packed bytes and block scales are equal, both tensor scales reciprocals."""
    return {
        "weight_packed": tensors[f"{module}.weight"],
        "weight_scale": tensors[f"{module}.weight_scale"],
        "weight_global_scale": (1 / tensors[f"{module}.weight_scale_2"]).reshape(1),
        "input_global_scale": (1 / tensors[f"{module}.input_scale"]).reshape(1),
    }


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block"])
def test_modelopt_and_compressed_tensors_dequantize_every_tensor_alike(format, out, new_target):
    source = new_target(format=format, layers=2)
    quantize_checkpoint(source, out, load_policy("k2.5"), ConversionOptions(workers=1))
    tensors, scheme = read_tensors(out), preset_name_to_scheme("NVFP4", ["Linear"])
    modules = modules_of(tensors)
    assert len(modules) > 10
    for module in modules:
        packed, scale, scale_2 = (
            tensors[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")
        )
        shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
        for dtype in (torch.bfloat16, torch.float32):
            theirs = NVFP4QTensor(shape, dtype, packed).dequantize(
                dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
            )
            assert torch.equal(theirs, ours(tensors, module, dtype)), module
        decoded = NVFP4PackedCompressor.decompress(as_compressed_tensors(tensors, module), scheme)[
            "weight"
        ]
        assert torch.equal(decoded, ours(tensors, module, decoded.dtype)), module


def test_transformers_computes_what_the_reference_model_computes(tmp_path, out, new_target):
    """transformers' logits of the decoded weights are those of the reference model.

    transformers knows `quant_method: modelopt` no more than it knows NVFP4 of its own.
    """
    from transformers.quantizers import AutoHfQuantizer

    source = new_target(format="int4", nested=False, layers=3)
    quantize_checkpoint(
        source, out, load_policy("k2.5"), ConversionOptions(kv_cache=None, workers=1)
    )
    tokens, model = (
        prompts(),
        load_target(out, dtype=torch.float32, activation="weight-only"),
    )
    with torch.no_grad():
        expected = model(tokens).logits
    config = read_json(out / "config.json")
    assert not AutoHfQuantizer.supports_quant_method(config.pop("quantization_config"))
    tensors = read_tensors(out)
    quantized = {
        f"{module}.weight": ours(tensors, module, torch.float32) for module in modules_of(tensors)
    }
    plain = {
        name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in SCALES
    } | quantized
    write(tmp_path / "decoded", config, plain)
    logits = transformers_logits(tmp_path / "decoded", tokens)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


SCALES = ("weight_scale", "weight_scale_2", "input_scale")


def write(directory: Path, config: dict, tensors: Tensors) -> None:
    directory.mkdir()
    write_json(directory / "config.json", config)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(directory, whole)
