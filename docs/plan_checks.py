"""Writes the tables of docs/plan-model.md from plan_published.yaml and the model: `python docs/plan_checks.py`.

python docs/plan_checks.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trtspec.data_files import gpu_spec
from trtspec.planning.kernels import kernels
from trtspec.planning.layout import Layout
from trtspec.planning.memory import memory
from trtspec.planning.planner import HOST_US, assumptions
from trtspec.planning.step import StepModel
from trtspec.planning.weights import checkpoint_bytes
from trtspec.trtllm.names import load_head, load_target

DOCS = Path(__file__).resolve().parent
START, END = "<!-- tables: written by docs/plan_checks.py -->", "<!-- end of tables -->"


def steps(target: str, head: str | None, gpu: str, gpus: int, context: int) -> StepModel:
    model = load_target(target).spec
    found = kernels(gpu_spec(gpu), model.quant.format)
    assert found is not None
    return StepModel(model, load_head(head).spec if head else None, Layout(gpus), found, context)


def error(predicted: float, published: float) -> str:
    return f"{100 * (predicted / published - 1):+.1f} %"


def header(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [row_of(*names).replace("|  |", "| |"), "|---" * len(names) + "|"]


def row_of(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def sizes(data: dict[str, Any]) -> list[str]:
    lines = ["### Checkpoint sizes", "", *header("checkpoint", "format", "published", "predicted", "error")]
    for row in data["sizes"]:
        found = checkpoint_bytes(load_target(row["checkpoint"]).spec)
        said, size = f"{row['said']} ({row['source']})", f"{found / 1e9:.2f} GB, {found / 2**30:.2f} GiB"
        off = f"{100 * (found / row['bytes'] - 1):+.2f} %"
        lines.append(row_of(row["checkpoint"], row["format"], said, size, off))
    return lines


def cache(data: dict[str, Any]) -> list[str]:
    lines = ["### Cache capacity", "", *header("target", "on", "published tokens", "predicted", "error")]
    for row in data["cache"]:
        room = memory(load_target(row["target"]).spec, None, gpu_spec(row["gpu"]), Layout(row["gpus"]))
        found = (0.9 * room.capacity - room.weights_total - room.reserve) / room.kv_bytes_per_token
        where = f"{row['gpus']} x {row['gpu'].upper()} ({row['source']})"
        off = error(found, row["tokens"])
        lines.append(row_of(row["target"], where, f"{row['tokens']:,}", f"{found:,.0f}", off))
    model, head = load_target("nvidia/Kimi-K2.6-NVFP4").spec, load_head("nvidia/Kimi-K2.6-Eagle3").spec
    rooms = {gpu: memory(model, head, gpu_spec(gpu), Layout(4)) for gpu in ("b200", "h200")}
    held, left = rooms["b200"].sequences(8192), rooms["h200"].free / 1e9
    lines += ["", f"Four B200 hold Kimi-K2.6-NVFP4 with its head and {held} requests of 8,192 tokens; four H200 lack"]
    lines += [f"{-left:.1f} GB each before the first token of cache."]
    return lines


def speedups(data: dict[str, Any]) -> list[str]:
    lines = []
    for group in data["speedups"]:
        lines += [f"### {group['name']}", "", f"Source: {group['source']}.", ""]
        columns = ("concurrency", "tokens per step", "published", "predicted", "error", "under other assumptions")
        lines += header("", *columns)
        found = steps(group["target"], group["head"], group["gpu"], 4, group["isl"] + group["osl"] // 2)
        errors = []
        for row in group["rows"]:
            published = row["published"] / row.get("base", 1)
            batch, length = row["concurrency"], row["acceptance"]
            predicted = length / found.cost_ratio(batch, 3)
            errors.append(abs(predicted / published - 1))
            range_ = [length / item.cost_ratio(batch, 3) for item in assumptions(found).values()]
            cells = (row["label"], str(batch), f"{length:.2f}", f"{published:.2f}x", f"{predicted:.2f}x")
            spread = f"{min(range_):.2f} to {max(range_):.2f}"
            lines.append(row_of(*cells, error(predicted, published), spread))
        lines += [
            "",
            f"Mean absolute error {100 * sum(errors) / len(errors):.1f} %, largest {100 * max(errors):.1f} %.",
            "",
        ]
    return lines


def sensitivities(data: dict[str, Any]) -> list[str]:
    """The first group under each assumption by name."""
    group = data["speedups"][0]
    found = steps(group["target"], group["head"], group["gpu"], 4, group["isl"] + group["osl"] // 2)
    models = {"as planned": found, **assumptions(found)}
    lines = ["### The same under each assumption", "", *header("concurrency", *models, "published")]
    for row in group["rows"]:
        cells = [f"{row['acceptance'] / item.cost_ratio(row['concurrency'], 3):.2f}" for item in models.values()]
        lines.append(row_of(str(row["concurrency"]), *cells, str(row["published"])))
    return lines


def single_steps(data: dict[str, Any]) -> list[str]:
    columns = ("published", "predicted", "error", "with 1 ms of host time")
    lines = ["### Steps in milliseconds", "", *header("", *columns)]
    for row in data["steps"]:
        found = steps("nvidia/Kimi-K2.6-NVFP4", None, row["gpu"], row["gpus"], 2048)
        slow = replace(found, host_us=HOST_US)
        values = []
        for item in (found, slow):
            extra = row["queries"] - 1
            plain = item.step(1) / 1000
            values.append((item.step(1, row["queries"]) / 1000 - plain) / extra if extra else plain)
        published, (ours, slower) = row["published_ms"], values
        said, off = f"{published} ({row['source']})", error(ours, published)
        lines.append(row_of(row["name"], said, f"{ours:.2f}", off, f"{slower:.2f}, {error(slower, published)}"))
    return lines


def rates(data: dict[str, Any]) -> list[str]:
    group = data["rates"]
    lines = [
        f"### {group['name']}",
        "",
        f"Source: {group['source']}. Tokens per second and user; the last two columns add, for",
        "every answer, one prefill that stops all others.",
        "",
    ]
    lines += header("GPU", "concurrency", "published", "decode alone", "error", "with prefill", "error")
    errors: dict[str, list[float]] = {"decode alone": [], "with prefill": []}
    for gpu, row in group["rows"].items():
        found = steps(group["target"], None, gpu, 8, group["isl"] + group["osl"] // 2)
        for concurrency, published in zip(group["concurrency"], row, strict=True):
            step = found.step(concurrency)
            stalled = step + concurrency * found.prefill(group["isl"]) / group["osl"]
            cells = [gpu.upper(), str(concurrency), str(published)]
            for name, duration in (("decode alone", step), ("with prefill", stalled)):
                predicted = 1e6 / duration
                errors[name].append(abs(predicted / published - 1))
                cells += [f"{predicted:.1f}", error(predicted, published)]
            lines.append(row_of(*cells))
    summary = "; ".join(
        f"{name} {100 * sum(e) / len(e):.0f} %, largest {100 * max(e):.0f} %" for name, e in errors.items()
    )
    return [*lines, "", f"Mean absolute error: {summary}."]


def tables() -> str:
    data = yaml.safe_load((DOCS / "plan_published.yaml").read_text(encoding="utf-8"))
    parts = (sizes, cache, speedups, sensitivities, single_steps, rates)
    return "\n\n".join("\n".join(part(data)).strip() for part in parts)


def main() -> None:
    path = DOCS / "plan-model.md"
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    wanted = f"{head}{START}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        sys.exit(0 if wanted == text else "docs/plan-model.md is not up to date: python docs/plan_checks.py")
    path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
