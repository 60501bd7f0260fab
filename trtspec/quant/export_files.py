"""Everything of an NVFP4 checkpoint but its weights: configs, carried files, the model card."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import HF_QUANT_NAME, INDEX_NAME
from trtspec.formats import NVFP4_BLOCK
from trtspec.quant.policy import Policy
from trtspec.quant.results import LinearErrors
from trtspec.report import fsync_directory, write_atomic, write_json
from trtspec.specs import ModelSpec

# The layout is ModelOpt's, version for version; loaders look for this name. provenance.json says who wrote the file.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
REPLACED = ("config.json", HF_QUANT_NAME, INDEX_NAME, "README.md", "provenance.json")


def quantization_config(exclude: list[str], kv_cache: str | None) -> dict[str, Any]:
    """The block that published NVFP4 checkpoints have in config.json."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    group = {"input_activations": numbers, "weights": dict(numbers), "targets": ["Linear"]}
    block: dict[str, Any] = {"config_groups": {"group_0": group}, "ignore": exclude, "quant_algo": "NVFP4"}
    if kv_cache == "fp8":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return block | {"producer": PRODUCER, "quant_method": "modelopt"}


def hf_quant_config(exclude: list[str], kv_cache: str | None) -> dict[str, Any]:
    """hf_quant_config.json, which TensorRT-LLM reads first. FP8 KV is the scale-free cast: no scale tensors."""
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,
        "group_size": NVFP4_BLOCK,
        "exclude_modules": exclude,
    }
    return {"producer": PRODUCER, "quantization": quantization}


def quantized_config(config: dict[str, Any], exclude: list[str], kv_cache: str | None) -> dict[str, Any]:
    """The source's config.json with its own quantization removed, also inside text_config, and ours on top."""
    result = copy.deepcopy(config)
    result.pop("quantization_config", None)
    if isinstance(result.get("text_config"), dict):
        result["text_config"].pop("quantization_config", None)
    return result | {"quantization_config": quantization_config(exclude, kv_cache)}


def carried_files(source: Path) -> list[Path]:
    """Tokenizer, template, remote code, generation config, licences: every file that is not weights or replaced."""
    return sorted(
        path
        for path in source.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in REPLACED
        and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
    )


def carry_files(source: Path, output: Path) -> list[str]:
    """Copies them byte for byte and returns their names."""
    files = carried_files(source)
    for path in files:
        temporary = output / f".{path.name}.carried.partial"
        try:
            shutil.copyfile(path, temporary)
            temporary.replace(output / path.name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync_directory(output)
    return [path.name for path in files]


def write_configs(output: Path, config: dict[str, Any], exclude: list[str], kv_cache: str | None) -> None:
    """config.json last: a directory without it is no checkpoint to any loader."""
    write_json(output / HF_QUANT_NAME, hf_quant_config(exclude, kv_cache))
    write_json(output / "config.json", quantized_config(config, exclude, kv_cache))


LICENCES = """\
Kimi-K2 models come under the Modified MIT licence: products with more than 100 million monthly active users or
20 million US dollars of monthly revenue must show the model's name prominently. A derived checkpoint keeps that duty;
licence files of the source, where it has any, lie beside this card.
"""
CARD = """\
---
base_model: {base}
license: other
license_name: modified-mit
library_name: tensorrt-llm
tags: [nvfp4, modelopt, trtspec]
---

# {title}, NVFP4

{architecture} with {layers} layers, from a {format} checkpoint.

- {quantized:,} linears are NVFP4 (4-bit E2M1 values, an E4M3 scale per 16, an FP32 scale per tensor), computed W4A4;
  {decoded:,} tensors were decoded to BF16 and {copied:,} are unchanged
- policy `{policy}`: {summary}
{published}
- KV cache: {kv}
- activation scales: {scales}; weight scales: {weight_scales}
- {size} bytes, from {size_in}

NVFP4 takes as many bytes as Kimi's own INT4 (4.5 bits per weight). The benefit is FP4 tensor-core
kernels and engine support; the cost is the rounding error below.

## Rounding error

Relative Frobenius error of the dequantized weight against the source's, on the first {rows} rows of every tensor.

| linears | tensors | relative error | all-zero blocks |
|---|---:|---:|---:|
{errors}
{zeros}
## Serving

    trtspec serve {output} --trust-remote-code
    trtllm-serve {output} --backend pytorch --trust_remote_code
    vllm serve {output} --trust-remote-code

The last two are the engines' own commands; set the tensor parallel size to your GPUs.

## Licence

{licence}"""


def publication(policy: Policy, deviations: list[str]) -> str:
    """Lines of the card: where the policy was published, whose bytes these are, what was done otherwise."""
    lines = []
    if policy.source:
        lines.append(f"- the policy is that of {policy.source}")
    if policy.recipe:
        lines.append(f"- recipe of ModelOpt: `modelopt_recipes/{policy.recipe}.yaml`")
    if policy.modelopt:
        lines.append(f"- the bytes equal those of ModelOpt's export for the same amax: {', '.join(policy.modelopt)}")
    lines += [f"- **otherwise than published**: {text}" for text in deviations]
    return "\n".join(lines) or "- the policy is the user's own"


def model_card(spec: ModelSpec, facts: dict[str, Any], classes: dict[str, LinearErrors], zeros: list[str]) -> str:
    """README.md of the output; nothing in it depends on when or how fast the conversion ran."""
    rows = [
        f"| {name} | {entry.tensors:,} | {entry.relative_error:.4f} | {entry.zero_blocks:,} |"
        for name, entry in sorted(classes.items())
    ]
    dead = ""
    if zeros:
        dead = f"\n{len(zeros)} tensors are entirely zero (scale_2 set to 1/2688): {', '.join(zeros[:8])}\n"
    return CARD.format(
        **facts,
        architecture=spec.architecture,
        layers=spec.num_hidden_layers,
        errors="\n".join(rows),
        zeros=dead,
        licence=LICENCES,
    )


def write_card(output: Path, text: str) -> None:
    write_atomic(output / "README.md", text)
