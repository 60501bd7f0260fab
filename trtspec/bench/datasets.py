"""Prompt sets for bench and check: MT-Bench `turns`, `messages`, or a plain `prompt`, one JSON object per line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec import data_files, files
from trtspec.bench import text_quality
from trtspec.errors import Problem, UsageError

NANO = "nano"


@dataclass(frozen=True)
class Question:
    """One conversation to hold: `opening` messages are sent with the first of `turns`; each turn is a user message."""

    id: str
    category: str
    turns: tuple[str, ...]
    opening: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Dataset:
    """A prompt file as read. `sha256` is of the whole file, `questions` may be a sample of it."""

    name: str
    sha256: str
    questions: tuple[Question, ...]
    problems: tuple[Problem, ...] = field(default=())


def load_dataset(name: str, samples: int | None = None) -> Dataset:
    """Reads `nano` (the held-out prompts of kimi-nano) or a .jsonl file; takes `samples`, spread over categories."""
    path = data_files.kimi_nano_dir() / "prompts_heldout.jsonl" if name == NANO else Path(name)
    if not path.is_file():
        raise UsageError(f"the dataset {path} does not exist", "pass --dataset FILE.jsonl, or --dataset nano")
    raw = files.read_bytes(path, remedy="pass a .jsonl file")
    questions: list[Question] = []
    for number, line in enumerate(files.decoded(raw, path).splitlines(), start=1):
        if line.strip():
            questions.append(parse_line(line, f"{path}:{number}", len(questions)))
    if not questions:
        raise UsageError(
            f"the dataset {path} holds no prompt", "each line is one JSON object with turns, messages or prompt"
        )
    chosen = spread(questions, samples)
    return Dataset(
        name=name if name == NANO else path.name,
        sha256=hashlib.sha256(raw).hexdigest(),
        questions=tuple(chosen),
        problems=tuple(random_prompt_problems(chosen, str(path))),
    )


def parse_line(line: str, where: str, index: int) -> Question:
    """One line of a dataset. Prompts given as token ids are refused: acceptance on ids nobody wrote means nothing."""
    try:
        record = files.parse_json(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}", "one JSON object per line") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} is not a JSON object", "one JSON object per line")
    identity = str(record.get("question_id", record.get("id", index)))
    category = str(record.get("category", "all"))
    if "turns" in record:
        return Question(identity, category, tuple(_text(turn, where) for turn in _items(record, "turns", where)))
    if "messages" in record:
        listed = _items(record, "messages", where)
        if not all(isinstance(message, dict) for message in listed):
            raise UsageError(f"{where} has a message that is no object", "each message is {role: ..., content: ...}")
        messages = [message for message in listed if message.get("role") != "assistant" or message.get("content")]
        last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=None)
        if last_user is None:
            raise UsageError(f"{where} has no user message", "messages must hold at least one {role: user, content}")
        opening = tuple(messages[:last_user])
        return Question(identity, category, (_text(messages[last_user].get("content"), where),), opening)
    if "prompt" in record:
        return Question(identity, category, (_text(record["prompt"], where),))
    raise UsageError(f"{where} has none of turns, messages, prompt", "see docs: the formats of --dataset")


def _items(record: dict[str, Any], key: str, where: str) -> list[Any]:
    if isinstance(record[key], list) and record[key]:
        return list(record[key])
    raise UsageError(
        f"{where} has {key} that are no list, or an empty one", f"write {key}: [...] with one item at least"
    )


def _text(value: Any, where: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        raise UsageError(
            f"{where} gives token ids, not text: random ids collapse acceptance and measure nothing real",
            "use prompts that somebody wrote",
        )
    raise UsageError(f"{where} has an empty or non-text prompt", "turns, content and prompt are non-empty strings")


def spread(questions: list[Question], samples: int | None) -> list[Question]:
    """`samples` questions taken round-robin over categories, so that a small sample still covers all of them."""
    if samples is None or samples >= len(questions):
        return list(questions)
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    chosen: list[Question] = []
    depth = 0
    while len(chosen) < samples:
        row = [group[depth] for group in groups.values() if depth < len(group)]
        chosen += row[: samples - len(chosen)]
        depth += 1
    return chosen


def random_prompt_problems(questions: list[Question], where: str) -> list[Problem]:
    """A warning when prompts read like decoded random token ids."""
    suspects = [q.id for q in questions if any(text_quality.looks_random(turn) for turn in q.turns)]
    if len(suspects) * 10 <= len(questions):
        return []
    shown = ", ".join(suspects[:5])
    return [
        Problem(
            "TS-BENCH-RANDOM-PROMPTS",
            "warning",
            where,
            f"{len(suspects)} of {len(questions)} prompts read like random tokens (for example {shown}); "
            "acceptance on them says nothing about real traffic",
            "use prompts that somebody wrote",
        )
    ]
