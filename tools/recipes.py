"""Writes configs/ and the chart's values of each recipe; `--check` exits 1 when one is stale.

Each file is what `trtspec build-config` with the words on its first line prints; nothing here adds
to it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from trtspec.trtllm.build import build_named, disaggregated
from trtspec.trtllm.intent import Goal, Intent
from trtspec.trtllm.kubernetes import helm_values
from trtspec.trtllm.schema import default_release

ROOT = Path(__file__).resolve().parent.parent
CONFIGS, CHART = ROOT / "configs", ROOT / "docker" / "helm" / "trtspec" / "recipes"
TARGETS = {
    "k2.5": "nvidia/Kimi-K2.5-NVFP4",
    "k2.6": "nvidia/Kimi-K2.6-NVFP4",
    "k2.7-code": "nvidia/Kimi-K2.7-Code-NVFP4",
}
HEADS = {
    ("k2.5", "eagle3"): "nvidia/Kimi-K2.5-Eagle3",
    ("k2.6", "eagle3"): "nvidia/Kimi-K2.6-Eagle3",
    ("k2.5", "lightseek-mla"): "lightseekorg/kimi-k2.5-eagle3-mla",
    ("k2.6", "lightseek-mla"): "lightseekorg/kimi-k2.6-eagle3-mla",
    ("k2.6", "eagle3.1"): "lightseekorg/kimi-k2.6-eagle3.1-mla",
    ("k2.7-code", "eagle3.1"): "lightseekorg/kimi-k2.7-coder-eagle3.1-mla",
}
# family, head, GPUs, kind of GPU, what for
WANTED = [
    *(
        (f, h, n, "b200", goal)
        for f in ("k2.5", "k2.6")
        for h in ("eagle3", "no-head")
        for n, goal in ((4, "latency"), (8, "throughput"))
    ),
    *(
        ("k2.5", "lightseek-mla", n, "b200", goal)
        for n, goal in ((4, "latency"), (8, "throughput"))
    ),
    *(
        ("k2.6", "lightseek-mla", n, "b200", goal)
        for n, goal in ((4, "latency"), (8, "throughput"))
    ),
    ("k2.6", "eagle3", 4, "b200", "throughput"),
    ("k2.6", "eagle3", 8, "b200", "latency"),
    ("k2.5", "eagle3", 4, "gb200", "latency"),
    ("k2.6", "eagle3", 4, "gb200", "latency"),
    ("k2.6", "eagle3", 4, "gb200", "throughput"),
    ("k2.6", "no-head", 4, "gb200", "latency"),
    ("k2.6", "eagle3.1", 4, "b200", "latency"),
    ("k2.6", "eagle3.1", 4, "gb200", "latency"),
    ("k2.7-code", "eagle3.1", 4, "b200", "latency"),
    ("k2.7-code", "no-head", 8, "b200", "throughput"),
    *(("k2.6", "eagle3", n, gpu, "128k") for n, gpu in ((4, "b200"), (8, "b200"), (4, "gb200"))),
]
LONG = 131072
LONG_REQUESTS = {(4, "b200"): 4, (8, "b200"): 16, (4, "gb200"): 6}
FOR = {
    "latency": "latency: the model card's sizes",
    "throughput": "throughput",
    "128k": "prompts and answers of 128k tokens together",
}


def intents() -> dict[str, tuple[Intent, str]]:
    """Name of the file without suffix -> intent and what it is for."""
    found = {}
    for family, head, gpus, gpu, purpose in WANTED:
        name = f"kimi-{family}-nvfp4-{head}-{gpus}x{gpu}-{purpose}"
        found[name] = (intent(family, head, gpus, gpu, purpose), FOR[purpose])
    apart = replace(
        intent("k2.6", "eagle3", 4, "gb200", "latency"), isl=8192, osl=1024, concurrency=64
    )
    for name, part in disaggregated(apart).items():
        stem = name.removesuffix(".yml")
        found[f"kimi-k2.6-nvfp4-eagle3-4xgb200-disaggregated-{stem}"] = (
            part,
            f"disaggregated, 8k prompts: {stem}",
        )
    apart = replace(intent("k2.5", "no-head", 8, "b200", "throughput"), isl=8192, osl=1024)
    context = replace(apart, role="context", tp_size=4, max_batch_size=2, max_num_tokens=16384)
    generation = replace(apart, role="generation", concurrency=1024)
    for stem, part in (
        ("4xb200-disaggregated-context", context),
        ("8xb200-disaggregated-generation", generation),
    ):
        what = f"disaggregated throughput: {part.role} server of InferenceX's sweep, 8k prompts"
        found[f"kimi-k2.5-nvfp4-no-head-{stem}"] = (part, what)
    return found


def intent(family: str, head: str, gpus: int, gpu: str, purpose: str) -> Intent:
    target, draft = TARGETS[family], HEADS.get((family, head))
    goal: Goal = "throughput" if purpose == "throughput" else "latency"
    found = Intent(
        target=target,
        version=default_release(),
        head=draft,
        goal=goal,
        tp_size=gpus,
        gpu=gpu,
        trust_remote_code=True,
    )
    if purpose == "128k":
        found = replace(found, max_seq_len=LONG, max_batch_size=LONG_REQUESTS[gpus, gpu])
    return found


def readme(rows: list[tuple[str, Intent, str]]) -> str:
    lines = [
        "<!-- Written by tools/recipes.py; edit that file instead. -->",
        "",
        "# Ready recipes",
        "",
        (
            "Engine configurations of released pairs. "
            "The first line of each file is the command that writes it again,"
        ),
        "byte for byte; it also lists the sizes, which are passed as options:",
        "",
        "    trtspec serve nvidia/Kimi-K2.5-NVFP4 --trust-remote-code --host 0.0.0.0 \\",
        "        --config configs/kimi-k2.5-nvfp4-eagle3-4xb200-latency.yml",
        "",
        (
            f"All are written for TensorRT-LLM {default_release()}. For another release, "
            "run the first line with it."
        ),
        "",
        "| file | head | GPUs | for |",
        "|---|---|---|---|",
    ]
    for name, item, purpose in rows:
        gpus = (
            f"{item.tp_size} "
            f"{(item.gpu or '').upper()}{', attention DP' if item.attention_dp else ''}"
        )
        gpus = "none" if item.role == "front" else gpus
        experimental = " (experimental)" if "eagle3.1" in (item.head or "") else ""
        lines.append(f"| `{name}.yml` | {item.head or 'none'}{experimental} | {gpus} | {purpose} |")
    lines += [
        "",
        (
            "Experimental: "
            "the author of the engine's EAGLE-3.1 support lists Kimi's MLA head as not tested."
        ),
        (
            "None of these has been run on a GPU by this project; "
            "they follow the model cards and public recipes, and"
        ),
        (
            "[Public recipes](../docs/reference/public-recipes.md) explains every difference. "
            "The same recipes as values"
        ),
        "of the Helm chart: `docker/helm/trtspec/recipes/`.",
    ]
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """Every file that belongs in the two directories."""
    found: dict[Path, str] = {}
    rows = []
    for name, (item, purpose) in intents().items():
        recipe = build_named(item)
        found[CONFIGS / f"{name}.yml"] = recipe.text
        if item.role is None:
            found[CHART / f"{name}.yaml"] = helm_values(recipe)
        rows.append((name, item, purpose))
    found[CONFIGS / "README.md"] = readme(rows)
    return found


def main() -> None:
    wanted = files()
    here = {path for place in (CONFIGS, CHART) for path in place.glob("*") if path.is_file()}
    stale = [
        path for path, text in wanted.items() if not path.is_file() or path.read_text() != text
    ]
    if "--check" in sys.argv:
        wrong = [*stale, *(here - set(wanted))]
        sys.exit(
            "\n".join(f"{path} is not up to date: python tools/recipes.py" for path in wrong)
            if wrong
            else 0
        )
    CHART.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(wanted[path])
    for path in here - set(wanted):
        path.unlink()


if __name__ == "__main__":
    main()
