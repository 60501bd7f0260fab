"""Prompt sets for bench and check: the questions of conversations, whichever way a file or a hub data set holds them.

A question is asked turn by turn, each with the model's own earlier answers. A recorded trace (`replay`) is asked with
the recorded messages instead: every request is the one that the agent once sent, so that the prefix grows and tools
answer as they did, whatever the model says now.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trtspec import data_files
from trtspec.bench.dataset_rows import DatasetSource, NamedSet, locate, rows_of, without_pictures
from trtspec.checkpoint.conversations import Conversation, conversation, note_unread
from trtspec.client import text_quality
from trtspec.errors import Problem, UsageError
from trtspec.report import file_sha256

NANO = "nano"
Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One conversation to hold: `opening` messages are sent with the first of `turns`; each turn is a user message.

    `parts[i]` are pictures sent with turn i, `tools` the functions offered. With `replay`, entry i holds the recorded
    messages that request i adds to those before it, and `turns` is empty. `raw` asks without a chat template.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    parts: tuple[tuple[Message, ...], ...] = ()
    replay: tuple[tuple[Message, ...], ...] = ()
    raw: bool = False

    @property
    def requests(self) -> int:
        """Answers that are asked for."""
        return len(self.replay) or len(self.turns)

    @property
    def has_pictures(self) -> bool:
        return any(self.parts) or any(isinstance(message["content"], list) for message in self.messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What is given and not the model's: the opening and the recorded messages."""
        return (*self.opening, *itertools.chain.from_iterable(self.replay))

    def first_request(self) -> tuple[list[Message], list[Message]]:
        """(messages, tools) of the first request, with its pictures: what a command sends that asks each question once.
        Such a command says with `left_out` what of a set it does not ask."""
        return self.request(0, []), list(self.tools)

    def request(self, turn: int, before: list[Message]) -> list[Message]:
        """The messages that turn `turn` adds to those `before` it."""
        if self.replay:
            return list(self.replay[turn])
        content: Any = self.turns[turn]
        if turn < len(self.parts) and self.parts[turn]:
            content = [{"type": "text", "text": content}] if content else []
            content += self.parts[turn]
        return [*(self.opening if turn == 0 else ()), {"role": "user", "content": content}]


@dataclass(frozen=True)
class Dataset:
    """A prompt set as read. `sha256` is of the whole file, or of the questions where there is no single file;
    `questions` may be a sample of it. `asked_sha256` is of these as they were read, with their turns and recordings."""

    name: str
    sha256: str
    questions: tuple[Question, ...]
    problems: tuple[Problem, ...] = field(default=())
    licence: str | None = None
    source: str | None = None
    asked_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetChoice:
    """What of a set is read: `limit` rows from its beginning, `samples` of their questions spread over categories, at
    most `turns` requests of each; `replay` asks every assistant message of a conversation again."""

    split: str | None = None
    limit: int | None = None
    samples: int | None = None
    turns: int | None = None
    replay: bool = False


def load_dataset(name: str, samples: int | None = None, choice: DatasetChoice | None = None) -> Dataset:
    """Reads `nano` (the held-out prompts of kimi-nano), a set known by name, a data file or directory, or a hub id.

    Raises UsageError naming the row that cannot be asked."""
    choice = choice or DatasetChoice(samples=samples)
    built_in = data_files.kimi_nano_dir() / "prompts_heldout.jsonl"
    source = DatasetSource(label=NANO, file=str(built_in)) if name == NANO else locate(name)
    questions = read_questions(source, choice)
    if not questions:
        raise UsageError(
            f"the dataset {source.file or name} holds no prompt",
            "each line is one JSON object with turns, messages or prompt",
        )
    chosen = spread(questions, choice.samples)
    known, where = source.known, source.file or source.label
    path = Path(source.file) if source.file else None
    return Dataset(
        name=source.label,
        sha256=file_sha256(path) if path and path.is_file() else questions_sha256(questions),
        questions=tuple(chosen),
        problems=(*random_prompt_problems(chosen, where), *size_problems(questions, source, choice)),
        licence=known.licence if known else None,
        source=known.source if known else None,
        asked_sha256=questions_sha256(chosen),
    )


def read_questions(source: DatasetSource, choice: DatasetChoice) -> list[Question]:
    """Every question of a source, in order. Ids are made unique: two rows of one id are two questions."""
    unread: Counter[str] = Counter()
    found: list[Question] = []
    rows = rows_of(source, choice.split)
    for index, row in enumerate(itertools.islice(rows, choice.limit)):
        plain, pictures = without_pictures(row)
        one = conversation(plain, unread)
        asked = trace_of(one, index, pictures) if choice.replay else question_of(one, index, pictures)
        found.append(shortened(asked, choice.turns))
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


def trace_of(conversation: Conversation, index: int, pictures: dict[int, list[Message]] | None = None) -> Question:
    """A recorded session: one request before each assistant message, with everything that was said up to there.

    Raises UsageError for one that never asks."""
    messages = _with_pictures(conversation, pictures)
    _refuse_unanswerable(conversation, messages)
    cuts = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
    if messages[-1]["role"] != "assistant":
        cuts.append(len(messages))
    starts = [0, *cuts]
    return Question(
        id=conversation.id or str(index),
        category=conversation.category or "all",
        turns=(),
        tools=conversation.tools,
        replay=tuple(tuple(messages[a:b]) for a, b in itertools.pairwise(starts)),
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


def left_out(questions: Sequence[Question], tools: bool = True, pictures: bool = True) -> str:
    """What a command does not ask that sends the first request of each question, in words, or "". `tools`, `pictures`:
    whether it sends those."""
    counts = {
        "requests after the first": sum(question.requests > 1 for question in questions),
        "tools": 0 if tools else sum(bool(question.tools) for question in questions),
        "pictures": 0 if pictures else sum(question.has_pictures for question in questions),
    }
    parts = [f"the {what} of {count} of {len(questions)} questions" for what, count in counts.items() if count]
    return f"{' and '.join(parts)} are not asked" if parts else ""


def text_of(message: Message) -> str:
    """The words of a message, without its pictures."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _pictures_of(message: Message) -> list[Message]:
    return [part for part in message["content"] if isinstance(part, dict) and part["type"] != "text"]


def shortened(question: Question, turns: int | None) -> Question:
    """The first `turns` requests of a question."""
    if turns is None or turns >= question.requests:
        return question
    fields = {**vars(question), "turns": question.turns[:turns], "replay": question.replay[:turns]}
    return Question(**{**fields, "parts": question.parts[:turns]})


def unique_ids(questions: list[Question]) -> list[Question]:
    """Questions told apart by their id: a second of one id gets its number in the set behind it."""
    seen: set[str] = set()
    found = []
    for number, question in enumerate(questions):
        name = question.id if question.id not in seen else f"{question.id}#{number}"
        seen.add(name)
        found.append(question if name == question.id else Question(**{**vars(question), "id": name}))
    return found


def questions_sha256(questions: list[Question]) -> str:
    """Of the questions themselves: a file says neither which of its turns are asked nor whether it is replayed."""
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


def size_problems(questions: list[Question], source: DatasetSource, choice: DatasetChoice) -> list[Problem]:
    """A warning where a known set is not whole: its figures do not compare with published ones."""
    known = source.known
    if known is None or choice.limit is not None or (source.config and source.config not in known.configs):
        return []
    if source.config and len(known.configs) > 1:
        return []
    categories = len({question.category for question in questions})
    wrong = [
        f"{got} {what} instead of {want}"
        for what, got, want in (
            ("questions", len(questions), known.questions),
            ("categories", categories, known.categories),
            ("questions of another number of turns", _odd_turns(questions, known), 0),
        )
        if want is not None and got != want
    ]
    if not wrong:
        return []
    message = f"{known.title} has {', '.join(wrong)}: figures on it do not compare with published ones"
    remedy = f"take the whole set from {known.source}"
    return [Problem("TS-BENCH-DATASET-SIZE", "warning", source.file or source.label, message, remedy)]


def _odd_turns(questions: list[Question], known: NamedSet) -> int:
    return sum(1 for question in questions if known.turns_each and question.requests != known.turns_each)


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
