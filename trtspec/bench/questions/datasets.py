"""Data sets of bench and check: questions, however a file or a hub data set holds them.

A question is asked turn by turn, each with the model's own earlier answers. Rows of the sets that data/datasets.yaml
knows by name are put into the words that the reader of conversations knows.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trtspec import data_files
from trtspec.checkpoint.conversations import (
    ANSWERS,
    IDS,
    Conversation,
    conversation,
    note_unread,
)
from trtspec.checkpoint.rows import CODE, SUFFIXES, DataRow, from_hub, hub_rows, read_rows
from trtspec.errors import UsageError, did_you_mean
from trtspec.files import missing
from trtspec.foreign import user_path
from trtspec.report import file_sha256

NANO = "nano"
LISTS = ("messages", "conversations", "conversation", "turns", "prompt")
NAMED = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<config>[\w.-]+))?(?:=(?P<file>.+))?")
NOT_REPLAYED = ("stream", "stream_options", "category", "timestamp")
LATE_TURN = 4  # this turn and later ones are one category
PICTURES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
Message = dict[str, Any]
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One conversation to hold: `opening` messages are sent with the first of `turns`. A turn is what the user says:
    text, or with pictures a list of parts. `tools` are the functions offered.

    A recorded request has no turns: `body` is sent as it is, and `opening` holds its messages. `sent_ms`: its
    `timestamp`."""

    id: str
    category: str
    turns: tuple[Content, ...]
    opening: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    body: Message | None = None
    sent_ms: Any = None

    @property
    def requests(self) -> int:
        """Answers that are asked for."""
        return len(self.turns) or 1

    @property
    def has_pictures(self) -> bool:
        return any(
            isinstance(said, list)
            for said in (*self.turns, *(each.get("content") for each in self.opening))
        )

    def first_request(self) -> tuple[list[Message], list[Message]]:
        """(messages, tools) of the first request."""
        return self.request(0), list(self.tools)

    def request(self, turn: int) -> list[Message]:
        """The messages that turn `turn` adds to the conversation."""
        opening = self.opening if turn == 0 else ()
        asked = [{"role": "user", "content": said} for said in self.turns[turn : turn + 1]]
        return [*opening, *asked]


@dataclass(frozen=True)
class Dataset:
    """A data set as read. `sha256` is of the whole file, or of all questions where there is no single file; `questions`
    may be a sample."""

    name: str
    sha256: str
    questions: tuple[Question, ...]
    licence: str | None = None
    source: str | None = None

    @property
    def recorded(self) -> list[Message]:
        """The bodies of recorded requests."""
        return [question.body for question in self.questions if question.body]

    def recorded_rate(self) -> float:
        """Requests per second as recorded. Raises UsageError if a row has no time."""
        times = [question.sent_ms for question in self.questions]
        if not all(isinstance(time, (int, float)) for time in times):
            remedy = "give each row a `timestamp` in milliseconds, or leave out `recorded_times`"
            raise UsageError(f"{self.name} has rows without a time", remedy)
        return len(times) * 1000 / max(max(times) - min(times), 1000)


def load_dataset(name: str, samples: int | None = None) -> Dataset:
    """Reads `nano` (the held-out prompts of kimi-nano), a set known by name, a data file or directory, or a hub id:
    all its questions, or `samples` of them spread over categories.

    Raises UsageError naming the row that cannot be asked."""
    source = locate(name)
    questions = read_questions(source)
    if not questions:
        raise UsageError(
            f"the dataset {source.file or name} holds no prompt",
            "each line is one JSON object with turns, messages or prompt",
        )
    if source.file and Path(source.file).is_file():
        digest = file_sha256(Path(source.file))
    else:
        text = json.dumps(
            [asdict(question) for question in questions], sort_keys=True, ensure_ascii=False
        )
        digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Dataset(
        name=source.label,
        sha256=digest,
        questions=tuple(spread(questions, samples)),
        licence=source.licence,
        source=source.source,
    )


def read_questions(source: QuestionSource) -> list[Question]:
    """Every question of a source, in order. Two rows of one id are two questions: the later gets its row's number.

    Raises UsageError if only some of the rows are recorded requests."""
    unread, seen, found = Counter[str](), set[str](), list[Question]()
    for index, row in enumerate(rows_of(source)):
        question = recorded_request(row, index) or asked_by(row, index, unread)
        if found and (question.body is None) != (found[0].body is None):
            message = f"{CODE} {row.where} mixes requests, which have `model`, with questions"
            raise UsageError(message, "write requests and questions in files of their own")
        if "images" in source.fields and not question.has_pictures:
            raise _no_field(row, source.fields["images"], source)
        name = question.id if question.id not in seen else f"{question.id}#{index}"
        seen.add(name)
        found.append(replace(question, id=name))
    note_unread(source.file or source.label, unread)
    return found


def recorded_request(row: DataRow, index: int) -> Question | None:
    """A row that is the body of a chat or completions request, alone or as `body` of a batch file's line. None for any
    other row, such as a conversation with its answer.

    Without a `category` the number of the user's turn is one. Raises UsageError for a body of several answers."""
    value = row.value if isinstance(row.value, dict) else {}
    body = value.get("body", value)
    if not isinstance(body, dict) or "model" not in body or {*ANSWERS, *IDS} & body.keys():
        return None
    prompt, messages = body.get("prompt"), body.get("messages")
    chat = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if chat and messages:
        opening, turn = tuple(messages), [each.get("role") for each in messages].count("user")
        category = f"turn {min(turn, LATE_TURN)}"
    elif prompt:
        opening, category = ({"role": "user", "content": prompt},), "completions"
    else:
        return None
    if body is value and opening[-1].get("role") == "assistant":
        return None
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    if several or any(body.get(key) not in (None, 1) for key in ("n", "best_of")):
        remedy = "leave out n and best_of, and write each prompt as a row"
        raise UsageError(f"{CODE} {row.where} asks for several answers", remedy)
    return Question(
        id=str(value.get("custom_id", index)),
        category=str(value.get("category", category)),
        turns=(),
        opening=opening,
        tools=tuple(body.get("tools") or ()),
        body={key: item for key, item in body.items() if key not in NOT_REPLAYED},
        sent_ms=value.get("timestamp"),
    )


def asked_by(row: DataRow, index: int, unread: Counter[str]) -> Question:
    """The question of a row that the reader of conversations knows, with the pictures in its `images`."""
    value, images = row.value, list[Any]()
    if isinstance(value, dict):
        images = value.get("images") or []
        value = {key: item for key, item in value.items() if key != "images"}
    shown = [_picture(row, image) for image in (images if isinstance(images, list) else [images])]
    known = conversation(replace(row, value=value), unread, pictures=True)
    return question_of(known, index, shown)


def question_of(
    conversation: Conversation, index: int, pictures: Sequence[Message] = ()
) -> Question:
    """What is asked at the end of a conversation, one turn or several without answers between, and all that precedes.
    `pictures` are shown with the first turn.

    An answer in the file behind it is dropped. Raises UsageError where nobody asks, or nothing that can be sent.
    """
    where, messages = conversation.where, list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    first = len(messages)
    while first and messages[first - 1]["role"] == "user":
        first -= 1
    functions = [tool.get("function") for tool in conversation.tools]
    if not all(
        isinstance(function, dict) and isinstance(function.get("name"), str)
        for function in functions
    ):
        remedy = "write {type: function, function: {name, description, parameters}}"
        raise UsageError(f"{where} has a tool without function.name", remedy)
    if first == len(messages):
        ends = (
            f"ends in a message of the role {messages[-1]['role']}"
            if messages
            else "has no user message"
        )
        raise UsageError(
            f"{where} {ends}", "a row holds a prompt, turns, or messages, with a user's at the end"
        )
    turns = [message["content"] for message in messages[first:]]
    if pictures:
        text = [{"type": "text", "text": turns[0]}] if turns[0] else []
        turns[0] = [*text, *pictures]
    if not all(said.strip() if isinstance(said, str) else said for said in turns):
        raise UsageError(
            f"{where} has an empty or non-text prompt",
            "turns, content and prompt are non-empty strings",
        )
    return Question(
        id=conversation.id or str(index),
        category=conversation.category or "all",
        turns=tuple(turns),
        opening=tuple(messages[:first]),
        tools=conversation.tools,
    )


def spread(questions: list[Question], samples: int | None) -> list[Question]:
    """`samples` questions taken round-robin over categories, so that a small sample still covers all of them."""
    if samples is None or samples >= len(questions):
        return list(questions)
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    one_of_each = zip_longest(*groups.values())
    return [question for row in one_of_each for question in row if question is not None][:samples]


# --- rows of the sets that are known by name ---


@dataclass(frozen=True, kw_only=True)
class QuestionSource:
    """Where questions come from: a row of data/datasets.yaml, from the hub or a `file` of its form; without `hub` any
    file, directory or hub id. `configs` are read one after the other; `others` only when they are named."""

    label: str
    file: str = ""
    title: str = ""
    hub: str = ""
    licence: str | None = None
    source: str | None = None
    revision: str = "main"
    split: str = "test"
    configs: Sequence[str] = ()
    others: Sequence[str] = ()
    fields: dict[str, str] = field(default_factory=dict)
    category: str = ""
    placeholder: str = ""
    prepare: str = ""


@functools.cache
def catalogue() -> dict[str, QuestionSource]:
    known = data_files.load_yaml("datasets.yaml")["datasets"]
    return {name: QuestionSource(label=name, **entry) for name, entry in known.items()}


def locate(text: str) -> QuestionSource:
    """`nano`, a path that exists, a known name (`NAME[:CONFIG][=FILE]`) or a hub id. Raises UsageError."""
    if text == NANO:
        return QuestionSource(
            label=NANO, file=str(data_files.kimi_nano_dir() / "prompts_heldout.jsonl")
        )
    if user_path(text).exists():
        return QuestionSource(label=Path(text).name, file=str(user_path(text)))
    match = NAMED.fullmatch(text)
    found = catalogue().get(match["name"]) if match else None
    if match and found:
        config, file = match["config"], match["file"] or ""
        if config and config not in (*found.configs, *found.others):
            listed = ", ".join((*found.configs, *found.others)) or "none"
            raise UsageError(
                f"the data set {found.label} has no configuration {config}", f"it has {listed}"
            )
        if file and not user_path(file).exists():
            raise missing(file, f"`dataset` {found.label} alone reads the hub")
        if config:
            category = found.category or (config if len(found.configs) > 1 else "")
            found = replace(found, configs=[config], category=category)
        return replace(found, label=text.partition("=")[0], file=file)
    if from_hub(text):
        return QuestionSource(label=text, file=text)
    remedy = f"pass a data file, a hub id org/name, nano, or one of {', '.join(catalogue())}, alone or as NAME=FILE"
    if Path(text).suffix in SUFFIXES:
        raise missing(text, remedy)
    raise UsageError(f"there is no data set {text}", did_you_mean(text, catalogue(), remedy))


def rows_of(source: QuestionSource) -> Iterator[DataRow]:
    """The rows of a source in the reader's words, each with its pictures still in it. Raises UsageError."""
    file = source.file
    if file:
        rows = read_rows(file)
        yield from (row_in_words(row, source) for row in rows) if source.hub else rows
        return
    for config in source.configs or [""]:
        own = replace(
            source, category=source.category or (config if len(source.configs) > 1 else "")
        )
        name = f"{source.hub}:{config}" if config else source.hub
        for row in hub_rows(name, source.split, source.revision):
            value = dict(row.value)
            if value.get("category") == source.split:
                del value["category"]  # hub_rows puts the split's name where a row has none
            yield row_in_words(replace(row, value=value), own)


def row_in_words(row: DataRow, known: QuestionSource) -> DataRow:
    """One row of a known set with the fields that `conversations` reads, and its `images`. A row without the fields
    that make its question is read as in any file.

    Raises UsageError for one that has neither, and for a text that is only a placeholder."""
    value, fields = row.value, known.fields
    if not isinstance(value, dict):
        return row
    if known.placeholder and known.placeholder in json.dumps(value, default=str):
        raise UsageError(
            f"{CODE} {row.where} holds a placeholder instead of the text", known.prepare
        )
    template, turns = fields.get("template", ""), fields.get("turns", "")
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name] or [turns]
    missing = [name for name in names if name not in value]
    if missing and not any(key in value for key in LISTS):
        raise _no_field(row, " and no ".join(missing), known)
    images = {"images": value[fields["images"]]} if fields.get("images") in value else {}
    if missing:
        own = {key: item for key, item in value.items() if key != fields.get("images")}
        return replace(row, value={"category": known.category, **own, **images})
    found: dict[str, Any] = {"turns": value[turns]} if turns else {}
    if template:
        words = {name: _words_in(row, value[name], name, known) for name in names}
        found = {"prompt": template.format(**words).strip()}
    identity = fields.get("id") or next((key for key in IDS if key in value), "")
    about = {
        "id": value.get(identity),
        "category": value.get(fields.get("category", "category")) or known.category,
    }
    return replace(
        row, value={key: item for key, item in (found | images | about).items() if item is not None}
    )


def _words_in(row: DataRow, item: Any, name: str, known: QuestionSource) -> str:
    """The words of one field of a question. Raises UsageError for a field without any, or of another kind."""
    if item is None or (isinstance(item, str) and not item.strip()):
        raise _no_field(row, name, known)
    if not isinstance(item, (str, int)) or isinstance(item, bool):
        raise UsageError(
            f"{CODE} {row.where} has a {name} that is not text", f"write {name} as a string"
        )
    return str(item)


def _no_field(row: DataRow, names: str, known: QuestionSource) -> UsageError:
    return UsageError(
        f"{CODE} {row.where} has no {names}, which rows of {known.title} have",
        f"the fields are listed at {known.source}",
    )


def _picture(row: DataRow, image: Any) -> Message:
    """A picture as a part of a message: an address stays, bytes become a data: URL. Raises UsageError for anything
    else."""
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:image/")):
        return {"type": "image_url", "image_url": {"url": image}}
    data: Any = image.get("bytes") if isinstance(image, dict) else image
    if hasattr(data, "save"):  # as the datasets library decodes it
        buffer = io.BytesIO()
        data.save(buffer, format="PNG")
        data = buffer.getvalue()
    kind = next(
        (name for magic, name in PICTURES if isinstance(data, bytes) and data.startswith(magic)),
        None,
    )
    if kind is None:
        raise UsageError(f"{CODE} {row.where} has an image that is neither a URL nor PNG, JPEG, GIF or WebP bytes",
                         "give a URL, a data: URL, or the bytes of a picture")  # fmt: skip
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
