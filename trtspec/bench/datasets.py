"""Prompt sets for bench and check: the questions of conversations, whichever way a file holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec import data_files
from trtspec.bench import text_quality
from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.errors import Problem, UsageError
from trtspec.report import file_sha256

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
    """Reads `nano` (the held-out prompts of kimi-nano) or a data file; takes `samples`, spread over categories."""
    path = data_files.kimi_nano_dir() / "prompts_heldout.jsonl" if name == NANO else Path(name)
    if not path.is_file():
        raise UsageError(f"the dataset {path} does not exist", "pass --dataset FILE.jsonl, or --dataset nano")
    questions = [question_of(found, index) for index, found in enumerate(read_conversations(path))]
    if not questions:
        raise UsageError(
            f"the dataset {path} holds no prompt", "each line is one JSON object with turns, messages or prompt"
        )
    chosen = spread(questions, samples)
    return Dataset(
        name=name if name == NANO else path.name,
        sha256=file_sha256(path),
        questions=tuple(chosen),
        problems=tuple(random_prompt_problems(chosen, str(path))),
    )


def question_of(conversation: Conversation, index: int) -> Question:
    """What is asked at the end of a conversation, one turn or several without answers between, and all that precedes.

    An answer in the file behind it is dropped. Raises UsageError where nobody asks, or nothing that can be sent.
    """
    where, messages = conversation.where, list(conversation.chat)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    first = len(messages)
    while first and messages[first - 1]["role"] == "user":
        first -= 1
    if not any(message["role"] == "user" for message in messages):
        raise UsageError(f"{where} has no user message", "a row holds a prompt, turns, or messages with a user's")
    if first == len(messages):
        raise UsageError(f"{where} ends in a message of the role {messages[-1]['role']}", "end it with a question")
    turns = tuple(message["content"] for message in messages[first:])
    if not all(turn.strip() for turn in turns):
        raise UsageError(f"{where} has an empty or non-text prompt", "turns, content and prompt are non-empty strings")
    if conversation.tools:
        raise UsageError(f"{where} has tools, which bench does not send", "leave tools out, or the row")
    identity, category = conversation.id or str(index), conversation.category or "all"
    return Question(identity, category, turns, tuple(messages[:first]))


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
