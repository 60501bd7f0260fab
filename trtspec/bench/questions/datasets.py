"""Data sets of bench and check: questions, however a file or a hub data set holds them.

A question is asked turn by turn, each with the model's own earlier answers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtspec import data_files
from trtspec.bench.questions.rows import DatasetSource, locate, rows_of, without_pictures
from trtspec.checkpoint.conversations import Conversation, conversation, note_unread
from trtspec.errors import UsageError
from trtspec.report import file_sha256

NANO = "nano"
Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One conversation to hold: `opening` messages are sent with the first of `turns`; each turn is a user message.

    `parts[i]` are pictures sent with turn i, `tools` the functions offered.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    parts: tuple[tuple[Message, ...], ...] = ()

    @property
    def requests(self) -> int:
        """Answers that are asked for."""
        return len(self.turns)

    @property
    def has_pictures(self) -> bool:
        return any(self.parts) or any(isinstance(message["content"], list) for message in self.opening)

    @property
    def first_turn(self) -> Question:
        return replace(self, turns=self.turns[:1], parts=self.parts[:1])

    def first_request(self) -> tuple[list[Message], list[Message]]:
        """(messages, tools) of the first request, with its pictures."""
        return self.request(0), list(self.tools)

    def request(self, turn: int) -> list[Message]:
        """The messages that turn `turn` adds to the conversation."""
        content: Any = self.turns[turn]
        if turn < len(self.parts) and self.parts[turn]:
            content = [{"type": "text", "text": content}] if content else []
            content += self.parts[turn]
        return [*(self.opening if turn == 0 else ()), {"role": "user", "content": content}]


@dataclass(frozen=True)
class Dataset:
    """A data set as read. `sha256` is of the whole file, or of the questions where there is no single file;
    `asked_sha256` is of `questions`, which may be a sample."""

    name: str
    sha256: str
    questions: tuple[Question, ...]
    licence: str | None = None
    source: str | None = None
    asked_sha256: str | None = None


def load_dataset(name: str, samples: int | None = None, *, split: str | None = None) -> Dataset:
    """Reads `nano` (the held-out prompts of kimi-nano), a set known by name, a data file or directory, or a hub id:
    all its questions, or `samples` of them spread over categories.

    Raises UsageError naming the row that cannot be asked."""
    built_in = data_files.kimi_nano_dir() / "prompts_heldout.jsonl"
    source = DatasetSource(label=NANO, file=str(built_in)) if name == NANO else locate(name)
    questions = read_questions(source, split)
    if not questions:
        raise UsageError(
            f"the dataset {source.file or name} holds no prompt",
            "each line is one JSON object with turns, messages or prompt",
        )
    chosen = spread(questions, samples)
    known = source.known
    path = Path(source.file) if source.file else None
    return Dataset(
        name=source.label,
        sha256=file_sha256(path) if path and path.is_file() else questions_sha256(questions),
        questions=tuple(chosen),
        licence=known.licence if known else None,
        source=known.source if known else None,
        asked_sha256=questions_sha256(chosen),
    )


def read_questions(source: DatasetSource, split: str | None = None) -> list[Question]:
    """Every question of a source, in order. Ids are made unique: two rows of one id are two questions."""
    unread: Counter[str] = Counter()
    found: list[Question] = []
    for index, row in enumerate(rows_of(source, split)):
        plain, pictures = without_pictures(row)
        found.append(question_of(conversation(plain, unread), index, pictures))
    note_unread(source.file or source.label, unread)
    return unique_ids(found)


def question_of(conversation: Conversation, index: int, pictures: dict[int, list[Message]] | None = None) -> Question:
    """What is asked at the end of a conversation, one turn or several without answers between, and all that precedes.

    An answer in the file behind it is dropped. Raises UsageError where nobody asks, or nothing that can be sent.
    """
    where, messages = conversation.where, _with_pictures(conversation, pictures)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    first = len(messages)
    while first and messages[first - 1]["role"] == "user":
        first -= 1
    _refuse_unanswerable(conversation, messages)
    if first == len(messages):
        raise UsageError(f"{where} ends in a message of the role {messages[-1]['role']}", "end it with a question")
    asked = messages[first:]
    turns = tuple(text_of(message) for message in asked)
    parts = tuple(tuple(_pictures_of(message)) for message in asked)
    if not all(text.strip() or shown for text, shown in zip(turns, parts, strict=True)):
        raise UsageError(f"{where} has an empty or non-text prompt", "turns, content and prompt are non-empty strings")
    return Question(
        id=conversation.id or str(index),
        category=conversation.category or "all",
        turns=turns,
        opening=tuple(messages[:first]),
        tools=conversation.tools,
        parts=parts if any(parts) else (),
    )


def _refuse_unanswerable(conversation: Conversation, messages: list[Message]) -> None:
    if not any(message["role"] == "user" for message in messages):
        raise UsageError(
            f"{conversation.where} has no user message", "a row holds a prompt, turns, or messages with a user's"
        )
    functions = [tool.get("function") for tool in conversation.tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise UsageError(
            f"{conversation.where} has a tool without function.name",
            "write {type: function, function: {name, description, parameters}}",
        )


def _with_pictures(conversation: Conversation, pictures: dict[int, list[Message]] | None) -> list[Message]:
    messages = list(conversation.chat)
    for place, parts in (pictures or {}).items():
        message = messages[-place]
        words = [{"type": "text", "text": message["content"]}] if message["content"] else []
        messages[-place] = {**message, "content": [*words, *parts]}
    return messages


def text_of(message: Message) -> str:
    """The words of a message, without its pictures."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _pictures_of(message: Message) -> list[Message]:
    return [part for part in message["content"] if isinstance(part, dict) and part["type"] != "text"]


def unique_ids(questions: list[Question]) -> list[Question]:
    """Makes ids unique by appending the row number to duplicates."""
    seen: set[str] = set()
    found = []
    for number, question in enumerate(questions):
        name = question.id if question.id not in seen else f"{question.id}#{number}"
        seen.add(name)
        found.append(replace(question, id=name))
    return found


def questions_sha256(questions: list[Question]) -> str:
    """Of the questions themselves."""
    text = json.dumps([asdict(question) for question in questions], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


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
