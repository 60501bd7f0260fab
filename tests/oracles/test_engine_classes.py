"""Files with a mistake in them, judged by lint and by TensorRT-LLM's own classes.

TRTSPEC_TRTLLM_SOURCES names a folder with one folder of sources for each release, called like it
(1.4.0rc1); without it these tests are skipped. Upstream's sources are never part of the project.
"""

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cases import slow
from tests.command_line import ROOT, printed
from tests.oracles.mutations import TABLES, Mutator
from trtspec.errors import Problem
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

AGREE = 0.997


@dataclass(frozen=True)
class Judged:
    what: str
    text: str
    errors: tuple[Problem, ...]
    why: str  # why the class refuses it, "" where it takes it
    unsure: bool  # lint says that it does not know whether this release takes something in it

    @property
    def false_alarm(self) -> bool:
        """An error where the class takes the file, and which is about the class."""
        return not self.why and any(not is_beyond(finding) for finding in self.errors)

    @property
    def stricter(self) -> bool:
        return not self.why and bool(self.errors) and not self.false_alarm


def is_beyond(finding: Problem) -> bool:
    return any(
        re.fullmatch(code, finding.code) and re.match(key, finding.key)
        for code, key, _ in TABLES["beyond"]
    )


def releases() -> list[str]:
    place = os.environ.get("TRTSPEC_TRTLLM_SOURCES")
    if not place:
        return []
    return sorted(
        folder.name for folder in Path(place).iterdir() if (folder / "tensorrt_llm").is_dir()
    )


def judged(release: str, count: int, seed: int) -> Iterator[Judged]:
    schema = schema_for(release)
    cases = list(itertools.islice(Mutator(schema, seed), count))
    sources = Path(os.environ["TRTSPEC_TRTLLM_SOURCES"]) / release
    words = [sys.executable, "-m", "tests.oracles.engine_classes", sources]
    asked = "".join(json.dumps({"text": text}) + "\n" for _, text in cases)
    lines = printed(*words, input=asked, cwd=ROOT).splitlines()
    answers = [json.loads(line) for line in lines][1:]
    assert len(answers) == count
    for (what, text), answer in zip(cases, answers, strict=True):
        found = lint(text, Deployment(schema))
        unsure = any(finding.code.endswith("-UNCERTAIN") for finding in found)
        yield Judged(
            what, text, tuple(f for f in found if f.severity == "error"), answer["why"], unsure
        )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [400, slow(5000)])
@pytest.mark.parametrize(
    "release", releases() or [pytest.param("", marks=pytest.mark.skip("no sources"))]
)
def test_lint_agrees(release: str, count: int) -> None:
    seed = 11 if count == 400 else int(os.environ.get("TRTSPEC_SEED", "1"))
    every = list(judged(release, count, seed))
    alarms = [one for one in every if one.false_alarm]
    missed = [one for one in every if one.why and not one.errors and not one.unsure]
    unsure = sum(bool(one.why) and not one.errors and one.unsure for one in every)
    stricter = sum(one.stricter for one in every)
    refused = sum(bool(one.why) for one in every)
    agreed = count - len(alarms) - len(missed)
    print(
        f"\n{release}: {count} files, {refused} refused by the class, "
        f"{agreed} judged alike ({agreed / count:.2%}),"
    )
    print(f"{stricter} of them with an error about behaviour alone; {len(alarms)} false alarms,")
    print(
        f"{len(missed)} missed, "
        f"{unsure} refused files in which lint says that it does not know a key or value"
    )
    lines = [
        f"ALARM {one.what}: {[(f.code, f.key, f.message) for f in one.errors]}" for one in alarms
    ]
    lines += [f"MISSED {one.what}: {one.why[:300]}" for one in missed]
    assert not alarms and agreed >= AGREE * count, "\n".join(lines[:60])
