"""ModelOpt's whole path on a tiny checkpoint, as a script: a CPU survives one quantization.

    python -m tests.quant.modelopt_oracle export SOURCE CONFIG OUT
        mtq.quantize + export_hf_checkpoint
    python -m tests.quant.modelopt_oracle layerwise SOURCE CONFIG OUT
        the same by 0.48's layerwise_export
    python -m tests.quant.modelopt_oracle forward SOURCE CONFIG OUT
        fake-quant forward, linears' inputs and outputs

CONFIG is one of mtq's dictionaries or a recipe's path; `,pinned` behind it pins every input amax to
2688.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.nn.modules import tensor_quantizer
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


def load(source: Path, dtype: torch.dtype) -> Any:
    """Loads the checkpoint into its native class, DeepSeek-V3's for `kimi_k2`.

    That model has none of its own and is DeepSeek-V3 by another name.
    """
    config = json.loads((source / "config.json").read_text())
    nested = "text_config" in config
    if not nested:
        config["model_type"] = "deepseek_v3"
        (source / "config.json").write_text(json.dumps(config))
    loader = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    model = loader.from_pretrained(source, dtype=dtype, experts_implementation="eager").eval()
    model.config.use_cache = False  # with a cache, ModelOpt calibrates on other activations
    return model


def calibrate(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    with torch.no_grad():
        for _ in range(4):
            model(input_ids=torch.randint(0, vocab, (2, 24), generator=generator))


def read_config(name: str) -> dict[str, Any]:
    """The `quant_cfg` and `algorithm` of a dictionary of mtq or of a recipe."""
    from modelopt.recipe import load_recipe

    plain, _, pinned = name.partition(",")
    config = (
        load_recipe(plain).quantize.model_dump(exclude_unset=True)
        if "/" in plain
        else getattr(mtq, plain)
    )
    config = copy.deepcopy(config)
    if pinned:
        for entry in config["quant_cfg"]:
            if entry["quantizer_name"].endswith("input_quantizer") and entry.get("cfg"):
                entry["cfg"]["constant_amax"] = 2688.0
        method = (
            config["algorithm"]
            if isinstance(config["algorithm"], dict)
            else {"method": config["algorithm"]}
        )
        config["algorithm"] = {**method, "skip_forward_without_activation_calib": True}
        if method["method"] != "max":  # only `max` knows how to do without
            del config["algorithm"]["skip_forward_without_activation_calib"]
    return config


def quantize(source: Path, config: str, dtype: torch.dtype) -> Any:
    tensor_quantizer.static_blockwise_fp4_fake_quant = static_block_quantize
    pinned = config.endswith(
        ",pinned"
    )  # then no forward is needed, and one over extreme weights would be NaN
    return mtq.quantize(
        load(source, dtype), read_config(config), (lambda model: None) if pinned else calibrate
    )


def export_layers(source: Path, config: str, out: Path) -> None:
    """Exports by ModelOpt 0.48's layerwise_export: a shard per calibrated layer, then the rest."""
    from modelopt.torch.export.layerwise_export import LayerwiseExporter

    tensor_quantizer.static_blockwise_fp4_fake_quant = static_block_quantize
    model, settings = load(source, torch.bfloat16), read_config(config)
    method = (
        settings["algorithm"]
        if isinstance(settings["algorithm"], dict)
        else {"method": settings["algorithm"]}
    )
    layerwise = {
        "enable": True,
        "export_dir": str(out),
        "get_qdq_activations_from_prev_layer": False,
    }
    settings["algorithm"] = {**method, "layerwise": layerwise}
    exporter = LayerwiseExporter(model, out, dtype=torch.bfloat16)
    mtq.quantize(model, settings, calibrate)
    exporter.finalize()


def dynamic_block_quantize(
    inputs: torch.Tensor, block_size: int, amax: torch.Tensor, *_: int
) -> torch.Tensor:
    """There and back through NVFP4QTensor in float32; ModelOpt has this op for CUDA only."""
    scale_2 = amax.float().amax() / (6.0 * 448.0)
    flat = inputs.float().reshape(-1, inputs.shape[-1])
    tensor, scale, _ = NVFP4QTensor.quantize(
        flat.clone(), block_size, weights_scaling_factor_2=scale_2
    )
    real = tensor.dequantize(
        torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: block_size}
    )
    return real.reshape(inputs.shape).to(inputs.dtype)


def static_block_quantize(
    inputs: torch.Tensor, amax: torch.Tensor, global_amax: torch.Tensor, *_: Any
) -> torch.Tensor:
    """There and back with given block maxima, in float32; ModelOpt has this op in Triton only."""
    scale = tensor_quant.scaled_e4m3_impl(amax.float() / 6.0, global_amax.float() / 6.0).reshape(
        -1, 1
    )
    blocks = inputs.float().reshape(amax.numel(), -1)
    divisor = torch.where(scale == 0, 1.0, scale)
    codes = NVFP4QTensor._cast_fp4(blocks / divisor)
    values = NVFP4QTensor.get_e2m1_values(inputs.device)[codes.long()] * divisor
    return torch.where(scale == 0, 0.0, values).reshape(inputs.shape).to(inputs.dtype)


def forward(model: Any, out: Path) -> None:
    """Stores x, y and both amaxes of every quantized nn.Linear of one fake-quant forward pass."""
    tensor_quant.dynamic_block_quantize_op = dynamic_block_quantize
    seen: dict[str, torch.Tensor] = {}

    def record(name: str):
        def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[f"{name}.x"], seen[f"{name}.y"] = args[0].clone(), output.clone()
            seen[f"{name}.input_amax"] = module.input_quantizer.amax.float().reshape(())
            seen[f"{name}.weight_amax"] = module.weight_quantizer.amax.float().reshape(())

        return hook

    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if isinstance(module, torch.nn.Linear) and quantizer is not None and quantizer.is_enabled:
            module.register_forward_hook(record(name))
    calibrate(model)
    save_file(
        {name: tensor.contiguous() for name, tensor in seen.items()}, out / "forward.safetensors"
    )


def main(mode: str, source: str, config: str, out: str) -> None:
    torch.set_num_threads(1)
    Path(out).mkdir(parents=True, exist_ok=True)
    if mode == "layerwise":
        export_layers(Path(source), config, Path(out))
        return
    model = quantize(Path(source), config, torch.float32 if mode == "forward" else torch.bfloat16)
    if mode == "forward":
        forward(model, Path(out))
    else:
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
