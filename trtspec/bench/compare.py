"""Two runs of `bench` side by side: ratios with spread, and what forbids the comparison."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.bench.acceptance import RatioSpread, ratio_with_spread
from trtspec.bench.results import BenchResults, ComparedRun, Comparison, SpeedRatio
from trtspec.errors import Problem

SAME = ("dataset_sha256", "temperature", "max_tokens", "api", "extra_body")


def compare(new: BenchResults, old: ComparedRun) -> Comparison:
    """Ratios new / old: acceptance length by category, tokens/s by concurrency, and the workload keys that differ.

    Acceptance ratios carry a bootstrap interval over answers; speed ratios the range of the rounds on both sides.
    """
    differing = [key for key in SAME if new.workload.get(key) != old.workload.get(key)]
    return Comparison(
        old={"name": old.name, "url": old.url, "server": old.server},
        differs=differing,
        acceptance=acceptance_ratios(new, old),
        speed=speed_ratios(new, old),
        problems=comparison_problems(differing),
    )


def comparison_problems(differing: Sequence[str]) -> list[Problem]:
    if not differing:
        return []
    return [
        Problem(
            "TS-BENCH-DIFFERENT-WORKLOAD",
            "warning",
            "--compare",
            f"the two runs differ in {', '.join(differing)}: the ratios mix that difference with the change under test",
            "run both with the same dataset and options",
        )
    ]


def acceptance_ratios(new: BenchResults, old: ComparedRun) -> dict[str, RatioSpread]:
    """Overall and per category, each with a 95 % bootstrap interval over answers."""
    labels = {"all": None, **{name: name for name in new.categories if name in old.categories}}
    ratios = {label: ratio_with_spread(_lengths(new, name), _lengths(old, name)) for label, name in labels.items()}
    return {label: ratio for label, ratio in ratios.items() if ratio}


def _lengths(results: BenchResults | ComparedRun, category: str | None) -> list[float]:
    turns = results.turns_detail
    return [turn.tokens_per_iteration for turn in turns if turn.tokens and category in (None, turn.category)]


def speed_ratios(new: BenchResults, old: ComparedRun) -> list[SpeedRatio]:
    """Per concurrency that both have: ratio of the mean tokens/s of the rounds, and its extreme values."""
    before = {level.concurrency: [rate for rate in level.rounds if rate] for level in old.concurrency}
    whole = {level.concurrency for level in old.concurrency if level.rounds and all(level.rounds)}
    found = []
    for level in new.concurrency:
        if level.concurrency not in whole or not all(level.rounds):
            continue
        a, b = level.rounds, before[level.concurrency]
        found.append(
            SpeedRatio(
                concurrency=level.concurrency,
                ratio=round((sum(a) / len(a)) / (sum(b) / len(b)), 4),
                low=round(min(a) / max(b), 4),
                high=round(max(a) / min(b), 4),
                rounds=(len(a), len(b)),
            )
        )
    return found
