"""Writes trtspec/data/kernels/<gpu>.json from a clone of ai-dynamo/aiconfigurator.

    python tools/kernel_tables.py CLONE

Only rows of Kimi-K2's shapes are taken, for the kernels that TensorRT-LLM can be set to use;
latencies become microseconds with one decimal. Nothing is averaged, smoothed or fitted. Needs
pyarrow; users of trtspec need neither.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

DATA = "aic-core/src/aiconfigurator_core/systems/data"
GPUS = {
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h200": "h200_sxm",
    "h100": "h100_sxm",
}
# Eight-rank collectives were measured inside one NVLink domain of B200 only; GB200 and GB300 have
# the same links.
SAME_LINKS = {"gb200": "b200", "gb300": "b200"}
OUT = Path(__file__).resolve().parent.parent / "trtspec" / "data" / "kernels"
LAYOUTS = {f"tp{n}": (n, 1) for n in (1, 4, 8, 16)} | {f"ep{n}": (1, n) for n in (4, 8, 16, 32)}
# our name -> file, dtype, kernel (prefix), routing
MOE = {
    "nvfp4": {
        "TRTLLM": (
            "moe/vllm/0.24.0",
            "nvfp4",
            "vllm_compressedtensorsw4a4nvfp4moe_flashinfer_trtllm",
        ),
        "CUTLASS": ("moe/trtllm/1.3.0rc20", "nvfp4", "moe_torch_flow_cutlass"),
    },
    "fp8-block": {
        "TRTLLM": ("moe/vllm/0.24.0", "fp8_block", "vllm_fp8moe_flashinfer_trtllm"),
        "DEEPGEMM": ("moe/trtllm/1.3.0rc20", "fp8_block", "deepgemm"),
        "CUTLASS": ("moe/trtllm/1.3.0rc20", "fp8_block", "moe_torch_flow_cutlass"),
    },
    "int4": {"MARLIN": ("moe/vllm/0.24.0", "int4_wo", "vllm_compressedtensorswna16marlinmoe")},
}
KIMI = {"num_experts": 384, "hidden_size": 7168, "inter_size": 2048, "topk": 8}
ROUTINGS = ("power_law_1.01", "balanced", "power_law_1.2")
HEADS = {64: "tp1", 16: "tp4", 8: "tp8", 4: "tp16"}  # local heads of Kimi's 64
CONTEXTS = (2, 512, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPTS = (1024, 2048, 4096, 8192, 16384)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)

Rows = list[dict[str, Any]]


def reader(clone: str) -> Callable[[str], Rows]:
    def read(path: str) -> Rows:
        done = subprocess.run(
            ["git", "-C", clone, "show", f"HEAD:{DATA}/{path}.parquet"], capture_output=True
        )
        return (
            parquet.read_table(io.BytesIO(done.stdout)).to_pylist() if done.returncode == 0 else []
        )

    return read


def us(milliseconds: float) -> float:
    return round(milliseconds * 1000, 1)


def series(rows: Rows, key: str, wanted: tuple[int, ...] | None = None) -> dict[int, float]:
    found = {row[key]: us(row["latency"]) for row in rows if wanted is None or row[key] in wanted}
    return dict(sorted(found.items()))


def moe(read: Callable[[str], Rows], system: str) -> dict[str, Any]:
    """By weight format, kernel, routing and layout: tokens -> us of an MoE layer.

    The shared expert is not in it.
    """
    found: dict[str, Any] = {}
    for fmt, kernels in MOE.items():
        for kernel, (place, dtype, prefix) in kernels.items():
            rows = [
                row
                for row in read(f"{system}/{place}/moe_perf")
                if row["moe_dtype"] == dtype
                and row["kernel_source"].startswith(prefix)
                and all(row[name] == value for name, value in KIMI.items())
            ]
            if rows:
                source = f"{place.removeprefix('moe/')} {rows[0]['kernel_source']}"
                found.setdefault(fmt, {})[kernel] = {"source": source} | {
                    way: layouts(rows, way) for way in ROUTINGS
                }
    return found


def layouts(rows: Rows, routing: str) -> dict[str, dict[int, float]]:
    found = {}
    for name, (tp, ep) in LAYOUTS.items():
        wanted = (routing, tp, ep)
        chosen = [
            row
            for row in rows
            if (row["distribution"], row["moe_tp_size"], row["moe_ep_size"]) == wanted
        ]
        if chosen:
            found[name] = series(chosen, "num_tokens")
    return found


def attention(read: Callable[[str], Rows], system: str, phase: str) -> Rows:
    rows = read(f"{system}/mla/trtllm/1.3.0rc20/mla_{phase}_module_perf")
    return [row for row in rows if (row["gemm_type"], row["kv_cache_dtype"]) == ("bfloat16", "fp8")]


def decode(rows: Rows) -> dict[str, Any]:
    """By local heads and context: batch -> us."""
    return {
        name: {
            context: series(
                [r for r in rows if (r["num_heads"], r["step"]) == (heads, context)],
                "batch_size",
                BATCHES,
            )
            for context in CONTEXTS
        }
        for heads, name in HEADS.items()
    }


def prefill(rows: Rows) -> dict[str, Any]:
    """By local heads: tokens of one prompt -> us."""
    alone = [row for row in rows if row["batch_size"] == 1 and not row.get("step")]
    return {
        name: series([r for r in alone if r["num_heads"] == heads], "isl", PROMPTS)
        for heads, name in HEADS.items()
    }


def collectives(rows: Rows) -> dict[int, Any]:
    ranks = sorted({row["num_gpus"] for row in rows})
    return {
        count: series([row for row in rows if row["num_gpus"] == count], "message_size")
        for count in ranks
    }


def gemms(rows: Rows, fixed: str, varied: str) -> dict[int, Any]:
    """By tokens: the width that varies -> us, the other being the model's 7168."""
    chosen = [
        row
        for row in rows
        if row["gemm_dtype"] == "bfloat16" and row[fixed] == 7168 and row[varied] >= 128
    ]
    return {
        tokens: series([row for row in chosen if row["m"] == tokens], varied) for tokens in TOKENS
    }


def tables(read: Callable[[str], Rows], gpu: str, system: str, commit: str) -> dict[str, Any]:
    linear = read(f"{system}/gemm/trtllm/1.3.0rc20/gemm_perf")
    return {
        "about": f"Measured kernel latencies on {gpu.upper()} in microseconds, "
        "taken by tools/kernel_tables.py. "
        "Attention, all-reduce and BF16 linear layers: TensorRT-LLM 1.3.0rc20. Attention: "
        "projections and attention of one layer with an FP8 cache, "
        "measured on DeepSeek-V3's module with that many local heads; "
        "its other shapes are Kimi-K2's.",
        "source": (
            f"ai-dynamo/aiconfigurator (Apache-2.0) {commit} systems/data/{system}, 2026-08-21"
        ),
        **({"same_links_as": SAME_LINKS[gpu]} if gpu in SAME_LINKS else {}),
        "moe": moe(read, system),
        "mla_decode": decode(attention(read, system, "generation")),
        "mla_prefill": prefill(attention(read, system, "context")),
        "allreduce": collectives(read(f"{system}/comm/trtllm/1.3.0rc20/custom_allreduce_perf")),
        "gemm_from_hidden": gemms(linear, "k", "n"),
        "gemm_to_hidden": gemms(linear, "n", "k"),
    }


def written(value: Any, depth: int = 0) -> str:
    """JSON with every series of numbers on a line of its own."""
    if not isinstance(value, dict) or not any(isinstance(item, dict) for item in value.values()):
        return json.dumps(value)
    pad = " " * (depth + 1)
    body = ",\n".join(
        f"{pad}{json.dumps(str(key))}: {written(item, depth + 1)}" for key, item in value.items()
    )
    return "{\n" + body + "\n" + " " * depth + "}"


def main() -> None:
    clone = sys.argv[1]
    head = subprocess.run(
        ["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    OUT.mkdir(exist_ok=True)
    for gpu, system in GPUS.items():
        found = tables(reader(clone), gpu, system, head.stdout.strip()[:12])
        (OUT / f"{gpu}.json").write_text(written(found) + "\n")


if __name__ == "__main__":
    main()
