"""A head of the published size through inspect and convert: seconds and peak memory.

    python -m tools.benchmarks.full_size_heads ROOM

Random BF16 weights in NVIDIA's MLA layout (16 tensors, 1,841,199,104 parameters, 3.7 GB), written in pieces, so that
this script needs no memory for them either. Each command runs in a process of its own; its peak resident memory is the
kernel's figure for that process. A plain copy of the same file with `cp` is timed too, because disks differ more than
programs do. Needs 8 GB of disk.
"""

from __future__ import annotations

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

from trtspec.checkpoint.published import catalogue

H, V, INNER, HEADS = 7168, 163840, 18432, 64
LAYER = {
    "self_attn.q_a_proj": (1536, 2 * H), "self_attn.q_a_layernorm": (1536,), "self_attn.q_b_proj": (HEADS * 192, 1536),
    "self_attn.kv_a_proj_with_mqa": (576, 2 * H), "self_attn.kv_a_layernorm": (512,),
    "self_attn.kv_b_proj": (HEADS * 256, 512), "self_attn.o_proj": (H, HEADS * 128), "mlp.gate_proj": (INNER, H),
    "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER), "hidden_norm": (H,), "input_layernorm": (H,),
    "post_attention_layernorm": (H,),
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (V, H),
    **{f"layers.0.{name}.weight": shape for name, shape in LAYER.items()},
}  # fmt: skip
TARGET, PARAMETERS = "nvidia/Kimi-K2.5-NVFP4", 1_841_199_104


def write_head(directory: Path) -> int:
    """A safetensors file of random BF16 values, 64 MiB of noise over and over, gains of one; returns its parameters."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(
        json.dumps(catalogue().heads["nvidia/Kimi-K2.5-Eagle3"].config)
    )
    header, offset = dict[str, Any](), 0
    for name, shape in SHAPES.items():
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
        for shape in SHAPES.values():
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
    room = Path(sys.argv[1]) / "full-size-heads"
    source, output = room / "head", room / "out"
    try:
        assert write_head(source) == PARAMETERS
        facts = report("inspect --against the target", "inspect", source, "--against", TARGET)
        assert (facts["dialect"], facts["parameters"]) == ("modelopt", PARAMETERS)
        report("inspect, every value", "inspect", source, "--sample", 0)
        words = ("convert", source, "-o", output, "--target", TARGET, "--to")
        report("convert to safeailab, which is refused", *words, "safeailab", status=3)
        report("the same as a dry run", *words, "safeailab", "--dry-run", status=3)
        copied(source, room)
        report("convert to vllm", *words, "vllm")
        copied(source, room)
        same = report(
            "inspect OUT --against SOURCE, every byte", "inspect", output, "--against", source
        )
        assert same["comparison"]["identical"] == len(SHAPES)
    finally:
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    main()
