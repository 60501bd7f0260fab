"""One MoE layer of Kimi-K2.5 at full size, generated and converted.

    python -m tools.benchmarks.full_size_layer DIRECTORY [--experts 384] [--format int4]
        [--workers 2] [--keep]

It has 384 experts, 7168 x 2048, 9.5 GB of INT4. Needs 20 GB in DIRECTORY. Prints GB/s of source,
the peak RSS and the time for K2.5's 595 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.tiny import make_tokenizer, target_config, text_config, text_tensors
from tests.tiny_formats import FP8_CONFIG, INT4_CONFIG, pack_fp8_block, pack_int4
from trtspec.checkpoint.writer import ShardFile, layout_of, write_index

HIDDEN, INNER = 7168, 2048
KIMI_BYTES = 595e9
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def stored(
    format: str, shape: tuple[int, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """One matrix as the published checkpoints of `format` store it."""
    weight = (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
    if format == "int4":
        return pack_int4(weight)
    if format == "fp8-block":
        blocks = -(-shape[0] // 128), -(-shape[1] // 128)
        codes = (weight.float() * 4000).to(torch.float8_e4m3fn)
        return {
            "weight": codes,
            "weight_scale_inv": torch.rand(blocks, generator=generator) * 2e-4 + 2e-4,
        }
    return {"weight": weight}


def varied(parts: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Rolls the rows so that experts differ; drawing each takes longer than converting it."""
    return {name: part.roll(number, 0) if part.dim() == 2 else part for name, part in parts.items()}


def _rest(text: dict[str, Any], format: str) -> dict[str, torch.Tensor]:
    """Everything but routed experts, linears of FP8 sources in FP8."""
    tensors, experts = text_tensors(text | {"n_routed_experts": 0}, 0), text["n_routed_experts"]
    tensors["model.layers.1.mlp.gate.weight"] = torch.ones(experts, HIDDEN, dtype=torch.bfloat16)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    for name in [name for name in tensors if name.endswith("_proj.weight") or "_with_mqa" in name]:
        if format == "fp8-block":
            packed = pack_fp8_block(tensors.pop(name))
            tensors |= {
                f"{name.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()
            }
    return tensors


def make_layer(directory: Path, format: str, experts: int, shards: int) -> Path:
    """A layer's routed experts at full size; the rest is as small as its config allows."""
    directory.mkdir(parents=True)
    sizes = {"moe_intermediate_size": INNER, "intermediate_size": INNER}
    text = text_config(layers=2, hidden=HIDDEN, experts=experts) | sizes
    config = target_config(text, nested=True)
    del config["vision_config"]
    if format != "bf16":
        config["quantization_config"] = INT4_CONFIG if format == "int4" else FP8_CONFIG
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    pool = {leaf: stored(format, shape, generator) for leaf, shape in SHAPES.items()}
    make_tokenizer(directory)
    rest = {f"language_model.{name}": tensor for name, tensor in _rest(text, format).items()}
    weight_map, total = {}, 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = range(experts)[shard * experts // shards : (shard + 1) * experts // shards]
        names = {
            f"language_model.model.layers.1.mlp.experts.{e}.{leaf}": (e, leaf)
            for e in mine
            for leaf in SHAPES
        }
        layout = {
            f"{module}.{name}": entry
            for module, (_, leaf) in names.items()
            for name, entry in layout_of(pool[leaf]).items()
        }
        beside = {} if shard else rest
        layout |= layout_of(beside)
        writer = ShardFile(directory / file, layout)
        for name, tensor in beside.items():
            writer.write(name, tensor)
            total += tensor.nbytes
        for module, (expert, leaf) in names.items():
            for name, part in varied(pool[leaf], expert).items():
                writer.write(f"{module}.{name}", part)
                total += part.nbytes
        writer.finish()
        weight_map |= dict.fromkeys(layout, file)
    write_index(directory, weight_map, total)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    for name, default in (("experts", 384), ("workers", 2), ("shards", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--format", default="int4", choices=["int4", "bf16", "fp8-block"])
    parser.add_argument("--keep", action="store_true", help="leave source and output")
    arguments = parser.parse_args()
    root = arguments.directory / "full-size-layer"
    matrix = HIDDEN * INNER * 3 * arguments.experts
    needed = matrix * {"int4": 1.125, "fp8-block": 1.5625, "bf16": 2.5625}[arguments.format]
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(arguments.directory).free < needed + 5e9:
        sys.exit(f"{arguments.directory} needs {needed / 1e9:.0f} GB and 5 to spare")
    torch.set_num_threads(1)
    try:
        begin = time.monotonic()
        source = make_layer(root / "in", arguments.format, arguments.experts, arguments.shards)
        print(f"generated in {time.monotonic() - begin:.0f} s", flush=True)
        words = ["quantize", str(source), "-o", str(root / "out"), "--policy", "k2.5", "--json"]
        words += ["--workers", str(arguments.workers)]
        command = [
            sys.executable,
            "-m",
            "trtspec",
            *words,
        ]  # a process of its own, whose peak it is
        result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        rate = result["bytes_in"] / result["seconds"]
        print(
            f"{arguments.format}: {result['quantized']} linears, {result['bytes_in'] / 1e9:.2f} "
            f"GB in {result['seconds']:.1f} s with {arguments.workers} threads: "
            f"{rate / 1e9:.3f} GB/s of source, peak RSS {result['peak_rss_bytes'] / 2**20:.0f} "
            f"MiB, {KIMI_BYTES / rate / 60:.0f} minutes for 595 GB; {result['classes']}"
        )
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
