"""The page of a proof: its verdict, and the tables of a model card. What was not measured has no table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtspec.bench.prove import PLAIN, ProveEvidence, ProveLine, degenerate, reused
from trtspec.bench.report.page import Section, render
from trtspec.bench.report.tables import BLANK, PER_QUESTION, number
from trtspec.report import Table, package_versions


def prove_html(evidence: ProveEvidence, lines: Sequence[ProveLine]) -> str:
    """One self-contained page."""
    setup, failed = evidence.setup, [line for line in lines if line.status == "fail"]
    gpus = ", ".join(sorted({gpu["name"] for gpu in evidence.gpus})) or "no GPU"
    rows = [[line.status, line.name, line.message] for line in lines]
    return render(
        "trtspec prove",
        f"{setup.target} with {setup.head}: {'not proved' if failed else 'proved'}",
        [],
        [
            Section(title="Verdict", tables=[Table("Verdict", [], rows, "", frozenset({0, 1, 2}))]),
            Section(title="Figures", tables=tables_of(evidence)),
        ],
        about=f"{setup.backend} {evidence.engine or ''} on {len(evidence.gpus)} GPUs ({gpus}); dataset "
        f"{setup.dataset}, {setup.samples} questions, at most {setup.max_tokens} tokens{evidence.mode}",
        versions=package_versions(),
    )


def tables_of(evidence: ProveEvidence) -> list[Table]:
    """Acceptance by category for each draft length, by our definition and by NVIDIA's, speed by concurrency, other
    workloads, launches."""
    heads = {launch: evidence.outputs[f"bench-{launch}"] for launch in sorted(evidence.speed) if launch != PLAIN}
    by_category = [_by_category(evidence, heads), _as_published(evidence, heads)]
    return [*by_category, _speed(evidence), _workloads(evidence), _launches(evidence)]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _categories(heads: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for found in heads.values() for name in found["categories"]))


def _by_category(evidence: ProveEvidence, heads: Mapping[str, Any]) -> Table:
    rows = [
        [name, *(_acceptance(found, found["categories"].get(name), name) for found in heads.values())]
        for name in _categories(heads)
    ]
    if rows:
        rows.append(["all", *(_acceptance(found, found) for found in heads.values())])
    columns = ["category", *(f"{launch.removeprefix('k')} drafts" for launch in heads)]
    title = f"Acceptance length by category, greedy{evidence.mode}"
    return Table(title, columns, rows, "1 + accepted / steps over all answers")


def _acceptance(results: Mapping[str, Any], group: Mapping[str, Any] | None, category: str | None = None) -> str:
    """Of a step's answers, or of those of a category; blank where they are degenerate."""
    return BLANK if degenerate(results, category) else _number((group or {}).get("acceptance_length"))


def _as_published(evidence: ProveEvidence, heads: Mapping[str, Any]) -> Table:
    """The layout of NVIDIA's cards: one row per draft length, one column per category, the mean over all questions."""
    names, rows = _categories(heads), []
    for launch, found in heads.items():
        if found.get("per_question_mean") is not None:
            cells = [BLANK if degenerate(found, n) else _question_mean(found["categories"].get(n)) for n in names]
            average = BLANK if degenerate(found) else _question_mean(found)
            rows.append([f"{launch.removeprefix('k')} drafts", *cells, average])
    title = f"Acceptance by category in the definition of NVIDIA's model cards, greedy{evidence.mode}"
    return Table(title, ["", *names, "average"], rows, PER_QUESTION)


def _question_mean(group: Mapping[str, Any] | None) -> str:
    return number(group.get("per_question_mean"), 2) if group else BLANK


def _speed(evidence: ProveEvidence) -> Table:
    speed = evidence.speed
    levels = list(dict.fromkeys(level for figures in speed.values() for level in figures))
    rows = [
        [level, *(_number((speed[launch].get(level) or {}).get("tokens_per_s"), 1) for launch in speed)]
        for level in levels
    ]
    return Table(f"Output tokens per second by concurrency{evidence.mode}", ["concurrency", *speed], rows)


def _workloads(evidence: ProveEvidence) -> Table:
    parts = {name: evidence.outputs.get(f"bench-{name}") for name in ("sampled", "cold", "warm")}
    rows = []
    for name, found in (parts | evidence.long_parts()).items():
        if found:
            share = reused(found)
            cached = "-" if share is None else f"{share:.0%}"
            rows.append([name, _acceptance(found, found), str(found.get("steps") or "-"), cached])
    note = (
        "sampled: temperature 1; cold: prompts sent for the first time; warm: the same prompts, sent before; then by "
        "prompt length, sent for the first time"
    )
    columns = ["workload", "acceptance length", "steps", "prompt from the cache"]
    return Table(f"Acceptance length on other workloads{evidence.mode}", columns, rows, note)


def _launches(evidence: ProveEvidence) -> Table:
    rows = []
    for launch, entry in evidence.memory.items():
        used = [f"{size / 2**30:.1f}" for size in entry["per_gpu"] or ()]
        rows.append([launch, f"{entry['seconds']:.0f}", " ".join(used) or "-", f"{entry['resident'] / 2**30:.1f}"])
    return Table("Launches", ["launch", "ready after (s)", "GiB by GPU", "GiB of host memory"], rows)
