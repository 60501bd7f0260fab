"""Heads of the published size through inspect and convert: seconds and peak memory.

    python tools/benchmarks/full_size_heads.py --room /tmp/heads

Random BF16 weights in NVIDIA's MLA layout (16 tensors, 1,841,199,104 parameters, 3.7 GB) and in lightseek's (with
embeddings, 3,015,604,224 parameters, 6.0 GB), written in pieces, so that this script needs no memory for them either.
Each command runs in a process of its own; its peak resident memory is the kernel's figure for that process. A plain
copy of the same file with `cp` is timed too, because disks differ more than programs do. Needs 16 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

H, V, INNER, HEADS = 7168, 163840, 18432, 64
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = {
    "self_attn.q_a_proj": (1536, 2 * H), "self_attn.q_a_layernorm": (1536,), "self_attn.q_b_proj": (HEADS * 192, 1536),
    "self_attn.kv_a_proj_with_mqa": (576, 2 * H), "self_attn.kv_a_layernorm": (512,),
    "self_attn.kv_b_proj": (HEADS * 256, 512), "self_attn.o_proj": (H, HEADS * 128), "mlp.gate_proj": (INNER, H),
    "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER), "hidden_norm": (H,), "input_layernorm": (H,),
    "post_attention_layernorm": (H,),
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": H,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": V, "draft_vocab_size": V, "torch_dtype": "bfloat16",
    "rope_theta": 50000.0, "max_position_embeddings": 262144, "bos_token_id": 163584, "eos_token_id": 163586,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
EAGLE = {IDS: [1, 29, 57], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
         "use_last_layernorm": True, "use_mtp_layernorm": False}  # fmt: skip


def shapes(prefix: str, embedding: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"fc": (H, 3 * H), "norm": (H,), "lm_head": (V, H)}
    found |= {f"{prefix}{name}": shape for name, shape in LAYER.items()}
    return {
        f"{name}.weight": shape
        for name, shape in (found | ({"embed_tokens": (V, H)} if embedding else {})).items()
    }


def write_head(directory: Path, tensors: dict[str, tuple[int, ...]], eagle: dict[str, Any]) -> int:
    """A safetensors file of random BF16 values, 64 MiB of noise over and over, gains of one; returns its parameters."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"eagle_config": eagle}))
    header, offset = dict[str, Any](), 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = (
        np.random.default_rng(0).normal(0, 0.02, 1 << 25).astype(np.float32).view(np.uint32) >> 16
    )
    raw = memoryview(noise.astype("<u2").tobytes())
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            size = 2 * math.prod(shape)
            if len(shape) == 1:
                stream.write(np.full(shape, 0x3F80, "<u2").tobytes())
                continue
            for begin in range(0, size, len(raw)):
                stream.write(raw[: min(len(raw), size - begin)])
        stream.flush()
        os.fsync(stream.fileno())
    return offset // 2


def measured(*words: object) -> tuple[float, float, int, subprocess.CompletedProcess[str]]:
    """Wall and processor seconds, peak resident bytes and the finished process, by the kernel's record of it."""
    script = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stdout=sys.stdout, stderr=sys.stderr)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print('USED', used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr)\n"
        "sys.exit(done.returncode)\n"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True
    )
    seconds = time.monotonic() - begun
    peak, processor = done.stderr.split("USED")[1].split()
    return seconds, float(processor), int(peak) * 1024, done


def report(label: str, *words: object, status: int = 0) -> dict[str, Any]:
    seconds, processor, peak, done = measured(sys.executable, "-m", "trtspec", *words, "--json")
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-2000:]
    print(
        f"{label:44} {seconds:7.1f} s, processor {processor:6.1f} s, peak {peak / 1e6:5.0f} MB",
        flush=True,
    )
    return json.loads(done.stdout)


def copied(source: Path, room: Path) -> None:
    begun = time.monotonic()
    subprocess.run(["cp", str(source / "model.safetensors"), str(room / "copy")], check=True)
    subprocess.run(["sync", str(room / "copy")], check=True)
    print(f"{'cp and sync of the same file':44} {time.monotonic() - begun:7.1f} s", flush=True)
    (room / "copy").unlink()


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--room", type=Path, required=True)
    arguments.add_argument(
        "--target", default="nvidia/Kimi-K2.5-NVFP4", help="a directory or a known hub id"
    )
    arguments.add_argument(
        "--back", action="store_true", help="convert back too; takes another copy's time and space"
    )
    arguments.add_argument(
        "--only", choices=("modelopt", "torchspec"), help="one of the two layouts"
    )
    given = arguments.parse_args()
    room: Path = given.room / "full-size-heads"
    shutil.rmtree(room, ignore_errors=True)
    modelopt = {
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    cases = (
        (
            "NVIDIA's layout",
            "layers.0.",
            False,
            EAGLE | modelopt,
            "modelopt",
            "vllm",
            1_841_199_104,
        ),
        ("lightseek's layout", "midlayer.", True, EAGLE, "torchspec", "trtllm", 3_015_604_224),
    )
    try:
        for name, prefix, embedding, eagle, dialect, to, parameters in cases:
            if given.only not in (None, dialect):
                continue
            source, output, back = room / dialect, room / "out", room / "back"
            assert write_head(source, shapes(prefix, embedding), eagle) == parameters
            print(
                f"\n{name}: {parameters:,} parameters, {len(shapes(prefix, embedding))} tensors, BF16",
                flush=True,
            )
            facts = report(
                "inspect --against the target", "inspect", source, "--against", given.target
            )
            assert (facts["dialect"], facts["parameters"]) == (dialect, parameters)
            report("inspect, every value", "inspect", source, "--sample", 0)
            copied(source, room)
            report(
                f"convert to {to}",
                "convert",
                source,
                "-o",
                output,
                "--to",
                to,
                "--target",
                given.target,
            )
            same = report(
                "inspect OUT --against SOURCE, every byte", "inspect", output, "--against", source
            )
            assert same["comparison"]["identical"] == len(shapes(prefix, embedding))
            if not given.back:
                shutil.rmtree(room)
                continue
            report(
                "convert back",
                "convert",
                output,
                "-o",
                back,
                "--to",
                dialect.replace("modelopt", "trtllm"),
            )
            begun, again = (
                json.loads((path / "provenance.json").read_text())["tensors"]
                for path in (output, back)
            )
            assert {tensor["sha256"] for tensor in begun.values()} == {
                tensor["sha256"] for tensor in again.values()
            }
            shutil.rmtree(room)
    finally:
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    main()
