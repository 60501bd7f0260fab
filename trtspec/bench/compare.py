"""Two runs of `bench` side by side: ratios with spread, and what forbids the comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trtspec import files
from trtspec.bench.acceptance import TurnCounts, ratio_with_spread
from trtspec.errors import Problem, TrtspecError, UsageError

SAME = ("dataset_sha256", "temperature", "max_tokens", "api", "extra_body")


@dataclass(frozen=True)
class _Level:
    concurrency: int
    rounds: list[float | None]


@dataclass(frozen=True)
class _Compared:
    """What a comparison reads of results.json."""

    name: str
    url: str
    server: dict[str, Any]
    workload: dict[str, Any]
    categories: dict[str, Any]
    concurrency: list[_Level]
    turns_detail: list[TurnCounts] = field(default_factory=list)


def read_results(path: Path) -> dict[str, Any]:
    """results.json of a directory or a file. Raises UsageError when it is not one."""
    file = path / "results.json" if path.is_dir() else path
    try:
        found = files.read_object(file)
        TypeAdapter(_Compared).validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _no_result(file, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, TrtspecError, ValueError) as error:
        raise _no_result(file, str(error)) from None
    return found


def _no_result(file: Path, reason: str) -> UsageError:
    return UsageError(
        f"{file} is not a result of `trtspec bench`: {reason}",
        "pass the directory given to bench -o, or its results.json",
    )


def compare(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Ratios new / old: acceptance length by category, tokens/s by concurrency, and the workload keys that differ.

    Acceptance ratios carry a bootstrap interval over answers; speed ratios the range of the rounds on both sides.
    """
    differing = [key for key in SAME if new["workload"].get(key) != old["workload"].get(key)]
    return {
        "old": {"name": old["name"], "url": old["url"], "server": old["server"]},
        "differs": differing,
        "acceptance": acceptance_ratios(new, old),
        "speed": speed_ratios(new["concurrency"], old["concurrency"]),
        "problems": [problem.to_dict() for problem in comparison_problems(differing)],
    }


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


def acceptance_ratios(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Overall and per category, each with a 95 % bootstrap interval over answers."""
    categories = [name for name in new["categories"] if name in old["categories"]]
    groups = {"all": None, **{name: name for name in categories}}
    found = {}
    for label, category in groups.items():
        ratio = ratio_with_spread(_lengths(new, category), _lengths(old, category))
        if ratio:
            found[label] = ratio
    return found


def _lengths(results: dict[str, Any], category: str | None) -> list[float]:
    turns = [TurnCounts(**detail) for detail in results.get("turns_detail", [])]
    return [turn.tokens_per_iteration for turn in turns if turn.tokens and category in (None, turn.category)]


def speed_ratios(new: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per concurrency that both have: ratio of the mean tokens/s of the rounds, and its extreme values."""
    before = {level["concurrency"]: level for level in old}
    found = []
    for level in new:
        other = before.get(level["concurrency"])
        if not other or not all(other["rounds"]) or not all(level["rounds"]):
            continue
        a, b = level["rounds"], other["rounds"]
        found.append(
            {
                "concurrency": level["concurrency"],
                "ratio": round((sum(a) / len(a)) / (sum(b) / len(b)), 4),
                "low": round(min(a) / max(b), 4),
                "high": round(max(a) / min(b), 4),
                "rounds": [len(a), len(b)],
            }
        )
    return found
