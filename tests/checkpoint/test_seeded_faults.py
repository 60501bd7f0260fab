"""Of 100 seeded faults of configs, tokenizers and rows at least 95 are refused or named.

The others are printed.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.target_faults import config_faults, make_drafts
from tests.checkpoint.test_rendering import TOOL, answers_of, five_turns
from tests.checkpoint.test_target_faults import inspected, spoiled
from tests.json_files import write_lines
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import read_samples

FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")
MARK = re.compile(r"\[[BE]OS\]|\[PAD\]|<\|(im|tool|media)_\w+\|>|</?think>")


def spoil_json(draw: random.Random, value: Any) -> str:
    """Drops, renames or replaces the value at a random path; returns what was done."""
    key = draw.choice([*value] if isinstance(value, dict) else range(len(value)))
    if value[key] and isinstance(value[key], dict | list):
        return f"{key}.{spoil_json(draw, value[key])}"
    old = value.pop(key)
    if isinstance(value, list) or draw.random() < 0.4:
        return f"{key} left out"
    if draw.random() < 0.3:
        value[f"{key}s"] = old
        return f"{key} renamed"
    value[key] = draw.choice([None, "x", [], {"x": 1}])
    return f"{key} is {value[key]!r}"


def spoil_text(draw: random.Random, path: Path) -> str:
    """Cuts the file, or writes another mark of the family in place of one."""
    text = path.read_text()
    marks = list(MARK.finditer(text))
    if marks and draw.random() < 0.8:
        mark, other = draw.choices(marks, k=2)
        new = "" if other[0] == mark[0] else other[0]
        path.write_text(text[: mark.start()] + new + text[mark.end() :])
        return f"{path.name} has {new!r} for {mark[0]} at {mark.start()}"
    path.write_text(text[: draw.randrange(len(text) - 1)])
    return f"{path.name} is cut"


def answers(messages: list[dict[str, Any]]) -> list[Any]:
    """Reasoning, content and calls of each answer."""
    return [
        [
            message.get("reasoning_content") or "",
            message.get("content") or "",
            [call["function"] for call in message.get("tool_calls") or ()],
        ]
        for message in messages
        if message["role"] == "assistant"
    ]


@pytest.fixture
def sorts(room: Path, capsys: Any) -> list[Callable[[random.Random], tuple[str, bool]]]:
    """Each makes a fault: what it spoiled, and whether that is refused or named."""
    drafts = [*make_drafts(room / "drafts").values()]
    target = drafts[1].write(room / "target")
    tokenizer = KimiTokenizer(target)

    def named(path: Path) -> bool:
        return any(problem.severity != "info" for problem in inspected(path, 0))

    def of_config(draw: random.Random) -> tuple[str, bool]:
        draft = draw.choice(drafts)
        fault = draw.choice([*config_faults(draft)])
        return f"{fault.kind}: {fault.name}", named(spoiled(draft, fault, room / "config"))

    def of_tokenizer(draw: random.Random) -> tuple[str, bool]:
        path = shutil.copytree(target, room / "tokenizer", dirs_exist_ok=True)
        return spoil_text(draw, path / draw.choice(FILES)), named(path)

    def of_row(draw: random.Random) -> tuple[str, bool]:
        row = {"messages": five_turns(True), "tools": [json.loads(json.dumps(TOOL))]}
        what = spoil_json(draw, row)
        path = write_lines(room / "row.jsonl", [row])
        capsys.readouterr()
        try:
            samples = read_samples(path, tokenizer, 9999)
        except TrtspecError:
            return what, True
        found = [message for part in samples for _, _, message in answers_of(part, tokenizer)]
        if "not read" in capsys.readouterr().err:
            return what, True
        if answers(found) == answers(row["messages"]):
            return of_row(draw)  # another row that is valid
        return what, False

    return [of_config, of_tokenizer, of_row]


@pytest.mark.parametrize(
    "count", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_a_fault_is_refused_or_named(sorts: Any, capsys: Any, count: int) -> None:
    missed = []
    for seed in range(count):
        what, named = sorts[seed % 3](random.Random(seed))
        missed += [] if named else [f"seed {seed}: {what}"]
    with capsys.disabled():
        print(f"\n{count - len(missed)} of {count} refused or named", *missed, sep="\n  ")
    assert len(missed) <= count / 20
