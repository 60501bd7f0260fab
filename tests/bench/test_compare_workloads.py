"""`--compare` of runs that asked different things of the same file, or of another model: named, and not judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.test_statistics import run_of
from trtspec.bench.compare import compare
from trtspec.bench.conditions import parse
from trtspec.bench.datasets import DatasetChoice, load_dataset
from trtspec.bench.measure import BenchWorkload
from trtspec.bench.results import BenchResults
from trtspec.client.client import RequestSampling
from trtspec.errors import UsageError

NAMES = [str(place) for place in range(12)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("set") / "questions.jsonl"
    said = [("user", "What is a list?"), ("assistant", "A sequence."), ("user", "Show me one."), ("assistant", "[1]")]
    rows = [{"id": name, "messages": [{"role": role, "content": text} for role, text in said]} for name in NAMES]
    turns = [{"id": f"t{name}", "turns": ["What is a list?", "Show me one."]} for name in NAMES]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows + turns))
    return file


def asked(questions: Path, under: tuple[str, ...] = (), **choice: Any) -> dict[str, Any]:
    work = BenchWorkload(
        load_dataset(str(questions), choice=DatasetChoice(**choice)), RequestSampling(8), (1, 4, 16), (None,) * 3,
        conditions=tuple(parse(under)),
    )  # fmt: skip
    return work.describe()


@pytest.fixture(scope="module")
def run() -> BenchResults:
    return run_of(np.random.default_rng(1), NAMES, np.zeros(len(NAMES)), 0.0)


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({}, {}, []),
        ({}, {"turns": 1}, ["questions_sha256"]),
        ({}, {"replay": True}, ["questions_sha256"]),
        ({"under": ("system=Be brief.",)}, {"under": ("system=Be brief.",)}, []),
        ({"under": ("system=Be brief.",)}, {"under": ("system=Write only in Chinese.",)}, ["under"]),
        ({}, {"under": ("context=2000",)}, ["under"]),
    ],
)
def test_what_was_asked_of_one_file_is_compared(
    run: BenchResults, questions: Path, before: dict[str, Any], now: dict[str, Any], differs: list[str]
) -> None:
    new, old = asked(questions, **now), asked(questions, **before)
    assert new["dataset_sha256"] == old["dataset_sha256"]
    found = compare(replace(run, workload=new), replace(run, workload=old), 0.05)
    assert found.differs == differs
    errors = [(p.code, p.severity) for p in found.problems if p.severity == "error"]
    assert errors == ([("TS-BENCH-DIFFERENT-WORKLOAD", "error")] if differs else [])
    assert any(figure.judged for figure in found.figures) is not bool(differs)


def test_another_model_is_named(run: BenchResults) -> None:
    old = replace(run, server=replace(run.server, model="another"))
    assert compare(run, old).differs == ["server.model"]


def test_two_system_prompts_are_two_conditions(tmp_path: Path) -> None:
    labels = [condition.label for condition in parse(["system=Be brief.", "system=Be kind.\nAnd brief."])]
    assert len(set(labels)) == 3 and "Be brief." in labels[1] and "Be kind." in labels[2]
    for name, text in (("a", "One."), ("b", "Two.")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "system.txt").write_text(text)
    files = [f"system={tmp_path / name / 'system.txt'}" for name in "ab"]
    labels = [condition.label for condition in parse(files)]
    assert len(set(labels)) == 3 and all("system.txt" in label for label in labels[1:])
    with pytest.raises(UsageError, match="twice"):
        parse(["system=Be brief.", "system=Be brief."])
