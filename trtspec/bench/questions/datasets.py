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
from trtspec.checkpoint.conversations import IDS, Conversation, conversation, note_unread
from trtspec.checkpoint.rows import CODE, DataRow, from_hub, hub_rows, read_rows
from trtspec.errors import UsageError
from trtspec.report import file_sha256

NANO = "nano"
LISTS = ("messages", "conversations", "conversation", "turns", "prompt")
NAMED = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<config>[\w.-]+))?(?:=(?P<file>.+))?")
PICTURES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
Message = dict[str, Any]
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One conversation to hold: `opening` messages are sent with the first of `turns`. A turn is what the user says:
    text, or with pictures a list of parts. `tools` are the functions offered."""

    id: str
    category: str
    turns: tuple[Content, ...]
    opening: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()

    @property
    def requests(self) -> int:
        """Answers that are asked for."""
        return len(self.turns)

    @property
    def has_pictures(self) -> bool:
        return any(
            not isinstance(said, str)
            for said in (*self.turns, *(each["content"] for each in self.opening))
        )

    def first_request(self) -> tuple[list[Message], list[Message]]:
        """(messages, tools) of the first request."""
        return self.request(0), list(self.tools)

    def request(self, turn: int) -> list[Message]:
        """The messages that turn `turn` adds to the conversation."""
        return [*(self.opening if turn == 0 else ()), {"role": "user", "content": self.turns[turn]}]


@dataclass(frozen=True)
class Dataset:
    """A data set as read. `sha256` is of the whole file, or of all questions where there is no single file; `questions`
    may be a sample."""

    name: str
    sha256: str
    questions: tuple[Question, ...]
    licence: str | None = None
    source: str | None = None


def load_dataset(name: str, samples: int | None = None, *, split: str | None = None) -> Dataset:
    """Reads `nano` (the held-out prompts of kimi-nano), a set known by name, a data file or directory, or a hub id:
    all its questions, or `samples` of them spread over categories.

    Raises UsageError naming the row that cannot be asked."""
    built_in = data_files.kimi_nano_dir() / "prompts_heldout.jsonl"
    source = QuestionSource(label=NANO, file=str(built_in)) if name == NANO else locate(name)
    questions = read_questions(source, split)
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


def read_questions(source: QuestionSource, split: str | None = None) -> list[Question]:
    """Every question of a source, in order. Two rows of one id are two questions: the later gets its row's number."""
    unread, seen, found = Counter[str](), set[str](), list[Question]()
    for index, row in enumerate(rows_of(source, split)):
        value, images = row.value, list[Any]()
        if isinstance(value, dict):
            images = value.get("images") or []
            value = {key: item for key, item in value.items() if key != "images"}
        shown = [
            _picture(row, image) for image in (images if isinstance(images, list) else [images])
        ]
        question = question_of(
            conversation(replace(row, value=value), unread, pictures=True), index, shown
        )
        if "images" in source.fields and not question.has_pictures:
            raise _no_field(row, source.fields["images"], source)
        name = question.id if question.id not in seen else f"{question.id}#{index}"
        seen.add(name)
        found.append(replace(question, id=name))
    note_unread(source.file or source.label, unread)
    return found


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
    """A path that exists, a known name (`NAME[:CONFIG][=FILE]`) or a hub id. Raises UsageError for anything else."""
    remedy = f"pass a data file, a hub id org/name, nano, or one of {', '.join(catalogue())}, alone or as NAME=FILE"
    if Path(text).expanduser().exists():
        return QuestionSource(label=Path(text).name, file=str(Path(text).expanduser()))
    match = NAMED.fullmatch(text)
    found = catalogue().get(match["name"]) if match else None
    if match and found:
        config, file = match["config"], match["file"] or ""
        if config and config not in (*found.configs, *found.others):
            listed = ", ".join((*found.configs, *found.others)) or "none"
            raise UsageError(
                f"the data set {found.label} has no configuration {config}", f"it has {listed}"
            )
        if file and not Path(file).expanduser().exists():
            raise UsageError(
                f"the dataset {file} does not exist", f"`dataset` {found.label} alone reads the hub"
            )
        if config:
            category = found.category or (config if len(found.configs) > 1 else "")
            found = replace(found, configs=[config], category=category)
        return replace(found, label=text.partition("=")[0], file=file)
    if from_hub(text):
        return QuestionSource(label=text, file=text)
    raise UsageError(f"the dataset {text} does not exist", remedy)


def rows_of(source: QuestionSource, split: str | None = None) -> Iterator[DataRow]:
    """The rows of a source in the reader's words, each with its pictures still in it. Raises UsageError, also for a
    `split` of files, all of whose rows are read."""
    file = source.file
    if split is not None and file and not from_hub(file):
        kind = "a directory" if Path(file).is_dir() else "a file"
        remedy = "pass the file of that split alone as `dataset`, without `split`"
        raise UsageError(
            f"`split` {split} is not used: the data set {source.label} is {kind}", remedy
        )
    if file:
        rows = read_rows(file, split)
        yield from (row_in_words(row, source) for row in rows) if source.hub else rows
        return
    for config in source.configs or [""]:
        own = replace(
            source, category=source.category or (config if len(source.configs) > 1 else "")
        )
        name = f"{source.hub}:{config}" if config else source.hub
        for row in hub_rows(name, split or source.split, source.revision):
            value = dict(row.value)
            if value.get("category") == (split or source.split):
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
