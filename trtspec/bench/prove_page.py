"""The page of a proof: its verdict, and the tables of a model card from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtspec.bench.prove import PLAIN, ProveLine, plan_findings
from trtspec.report import Table


def prove_html(evidence: Mapping[str, Any], lines: Sequence[ProveLine]) -> str:
    """One self-contained page. What was not measured has no table."""
    from trtspec.bench.report import environment

    setup, failed = evidence["setup"], [line for line in lines if line.status == "fail"]
    skipped = sum(line.status == "skipped" for line in lines)
    gpus = ", ".join(sorted({gpu["name"] for gpu in evidence["gpus"]})) or "no GPU"
    return (
        environment()
        .get_template("prove.html.j2")
        .render(
            title=f"{setup['target']} with {setup['head']}: {'not proved' if failed else 'proved'}",
            about=f"{evidence['backend']} {evidence['engine'] or ''} on {len(evidence['gpus'])} GPUs ({gpus}); "
            f"dataset {setup['dataset']}, {setup['samples']} questions, at most {setup['max_tokens']} tokens",
            keys=[
                {"value": str(sum(line.status == "pass" for line in lines)), "label": "passed"},
                {"value": str(len(failed)), "label": "failed"},
                {"value": str(skipped), "label": "skipped"},
            ],
            lines=lines,
            tables=[table for table in tables_of(evidence) if table.rows],
            created="",
            versions=evidence["versions"],
            plots=False,
        )
    )


def tables_of(evidence: Mapping[str, Any]) -> list[Table]:
    """Acceptance by category for each draft length, speed by concurrency, other workloads, the plan."""
    return [_by_category(evidence), _speed(evidence), _workloads(evidence), _launches(evidence), _plan(evidence)]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _heads(evidence: Mapping[str, Any]) -> list[str]:
    return sorted(launch for launch in evidence["speed"] if launch != PLAIN)


def _by_category(evidence: Mapping[str, Any]) -> Table:
    outputs, heads = evidence["outputs"], _heads(evidence)
    results = {launch: outputs[f"bench-{launch}"] for launch in heads}
    names = list(dict.fromkeys(name for found in results.values() for name in found["categories"]))
    rows = [
        [name, *(_number(results[k]["categories"].get(name, {}).get("acceptance_length")) for k in heads)]
        for name in names
    ]
    if rows:
        rows.append(["all", *(_number(results[k]["acceptance_length"]) for k in heads)])
    columns = ["category", *(f"{k.removeprefix('k')} drafts" for k in heads)]
    return Table("Acceptance length by category, greedy", columns, rows, "1 + accepted / steps over all answers")


def _speed(evidence: Mapping[str, Any]) -> Table:
    speed = evidence["speed"]
    levels = list(dict.fromkeys(level for figures in speed.values() for level in figures))
    rows = [
        [level, *(_number((speed[launch].get(level) or {}).get("tokens_per_s"), 1) for launch in speed)]
        for level in levels
    ]
    return Table("Output tokens per second by concurrency", ["concurrency", *speed], rows)


def _workloads(evidence: Mapping[str, Any]) -> Table:
    rows = []
    for name in ("sampled", "warm", "long"):
        found = evidence["outputs"].get(f"bench-{name}")
        if found:
            rows.append([name, "all", _number(found.get("acceptance_length")), str(found.get("steps") or "-")])
            rows += [
                [name, category, _number(part.get("acceptance_length")), str(part.get("steps") or "-")]
                for category, part in found["categories"].items()
                if name != "sampled"
            ]
    note = "sampled: temperature 1; warm: each prompt twice in a row, second time cached; long: by prompt length"
    return Table("Acceptance length on other workloads", ["workload", "part", "acceptance length", "steps"], rows, note)


def _launches(evidence: Mapping[str, Any]) -> Table:
    rows = []
    for launch, entry in evidence["memory"].items():
        used = [f"{size / 2**30:.1f}" for size in entry["per_gpu"] or ()]
        rows.append([launch, f"{entry['seconds']:.0f}", " ".join(used) or "-", f"{entry['resident'] / 2**30:.1f}"])
    return Table("Launches", ["launch", "ready after (s)", "GiB by GPU", "GiB of host memory"], rows)


def _plan(evidence: Mapping[str, Any]) -> Table:
    rows = [
        [f.what, f"{f.planned:.4g}", f"{f.measured:.4g}", f"{f.ratio:.2f}", f.status] for f in plan_findings(evidence)
    ]
    return Table("Against the plan", ["figure", "planned", "measured", "ratio", ""], rows)
