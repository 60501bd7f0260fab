"""Data sets of bench and check: reads questions from a file or a hub data set.

A question is asked turn by turn, each with the model's answers to the earlier turns. Rows of the
sets that data/datasets.yaml knows by name get the fields that the reader of conversations knows.
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
from itertools import chain, zip_longest
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
from trtspec.checkpoint.data_rows import CODE, SUFFIXES, DataRow, from_hub, hub_rows, read_rows
from trtspec.errors import UsageError, did_you_mean
from trtspec.files import missing
from trtspec.foreign import user_path
from trtspec.report import file_sha256

NANO = "nano"
LISTS = ("messages", "conversations", "conversation", "turns", "prompt")
NAMED = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<config>[\w.-]+))?(?:=(?P<file>.+))?")
NOT_REPLAYED = ("stream", "stream_options", "category", "timestamp")
LATE_TURN = 4  # this turn and later ones are one category
IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
Message = dict[str, Any]
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One conversation to hold.

    `turns`: contents of the user's messages, text or with pictures a list of parts. `opening`:
    messages before the first turn. `tools`: functions offered. A recorded request has no turns: its
    `body` is sent as it is, `opening` holds its messages, and `sent_ms` its `timestamp`.
    """

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
        """Whether a message has a list of parts as its content."""
        contents = [message.get("content") for message in self.opening]
        return any(isinstance(content, list) for content in (*contents, *self.turns))

    def first_request(self) -> tuple[list[Message], list[Message]]:
        """Returns the messages and tools of the first request."""
        return self.request(0), list(self.tools)

    def request(self, turn: int) -> list[Message]:
        """Returns the messages that a turn adds to the conversation."""
        messages = [{"role": "user", "content": content} for content in self.turns[turn : turn + 1]]
        return messages if turn else [*self.opening, *messages]


@dataclass(frozen=True)
class Dataset:
    """A data set as read.

    `sha256`: of the file, or of all questions if there is no single file. `questions`: all, or a
    sample.
    """

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
        """Returns the requests per second as recorded. Raises UsageError if a row has no time."""
        times = [question.sent_ms for question in self.questions]
        if not all(isinstance(time, (int, float)) for time in times):
            remedy = "give each row a `timestamp` in milliseconds, or leave out `recorded_times`"
            raise UsageError(f"{self.name} has rows without a time", remedy)
        duration_ms: float = max(max(times) - min(times), 1000)
        return len(times) * 1000 / duration_ms


def load_dataset(name: str, samples: int | None = None) -> Dataset:
    """Reads a data set, all its questions or `samples` of them spread over categories.

    `name`: `nano` (the held-out prompts of kimi-nano), a set known by name, a data file or
    directory, or a hub id. Raises UsageError naming the row that cannot be asked.
    """
    source = locate(name)
    file = source.file
    questions = read_questions(source)
    if not questions:
        message = f"the dataset {file or name} holds no prompt"
        raise UsageError(message, "each line is one JSON object with turns, messages or prompt")
    if file and Path(file).is_file():
        digest = file_sha256(Path(file))
    else:
        values = [asdict(question) for question in questions]
        text = json.dumps(values, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    chosen = spread(questions, samples)
    return Dataset(
        name=source.label,
        sha256=digest,
        questions=tuple(chosen),
        licence=source.licence,
        source=source.source,
    )


def read_questions(source: QuestionSource) -> list[Question]:
    """Reads every question of a source, in order.

    Two rows of one id are two questions, and the later gets its row's number. Raises UsageError if
    only some of the rows are recorded requests.
    """
    unread = Counter[str]()
    questions: list[Question] = []
    seen = set()
    for index, row in enumerate(rows_of(source)):
        question = recorded_request(row, index) or asked_by(row, index, unread)
        if questions and (question.body is None) != (questions[0].body is None):
            message = f"{CODE} {row.where} mixes requests, which have `model`, with questions"
            raise UsageError(message, "write requests and questions in files of their own")
        if "images" in source.fields and not question.has_pictures:
            raise _no_field(row, source.fields["images"], source)
        name = question.id
        if name in seen:
            name = f"{name}#{index}"
        seen.add(name)
        questions.append(replace(question, id=name))
    note_unread(source.file or source.label, unread)
    return questions


def recorded_request(row: DataRow, index: int) -> Question | None:
    """Reads a row that is the body of a chat or completions request.

    The row is the body, or has it as `body`, as a line of a batch file does. None for any other
    row, such as a conversation with its answer. The default category is the number of the user's
    turn. Raises UsageError if the body asks for several answers.
    """
    value = row.value if isinstance(row.value, dict) else {}
    body = value.get("body", value)
    if not isinstance(body, dict) or "model" not in body or {*ANSWERS, *IDS} & body.keys():
        return None
    messages = body.get("messages")
    prompt = body.get("prompt")
    if messages and isinstance(messages, list) and all(isinstance(item, dict) for item in messages):
        opening = tuple(messages)
        roles = [message.get("role") for message in messages]
        category = f"turn {min(roles.count('user'), LATE_TURN)}"
    elif prompt:
        opening = ({"role": "user", "content": prompt},)
        category = "completions"
    else:
        return None
    # a conversation with its answer is a question, unless a batch file says that it is a request
    if body is value and opening[-1].get("role") == "assistant":
        return None
    prompts = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    if prompts or any(body.get(key) not in (None, 1) for key in ("n", "best_of")):
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
    """Reads the question of a conversation, with the pictures in its `images`."""
    value = row.value
    images: Any = []
    if isinstance(value, dict):
        images = value.get("images") or []
        value = {key: item for key, item in value.items() if key != "images"}
    if not isinstance(images, list):
        images = [images]
    pictures = [_picture(row, image) for image in images]
    text_row = replace(row, value=value)
    return question_of(conversation(text_row, unread, pictures=True), index, pictures)


def question_of(
    conversation: Conversation, index: int, pictures: Sequence[Message] = ()
) -> Question:
    """Returns the question at the end of a conversation.

    It is the user's last turns, and the messages before them. `pictures` are shown with the first
    turn. An answer at the end is dropped. Raises UsageError if the conversation does not end in a
    question that can be sent.
    """
    where = conversation.where
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    first = len(messages)
    while first and messages[first - 1]["role"] == "user":
        first -= 1
    for tool in conversation.tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            remedy = "write {type: function, function: {name, description, parameters}}"
            raise UsageError(f"{where} has a tool without function.name", remedy)
    if first == len(messages):
        ends = "has no user message"
        if messages:
            ends = f"ends in a message of the role {messages[-1]['role']}"
        remedy = "a row holds a prompt, turns, or messages, with a user's at the end"
        raise UsageError(f"{where} {ends}", remedy)
    turns = [message["content"] for message in messages[first:]]
    if pictures:
        text = [{"type": "text", "text": turns[0]}] if turns[0] else []
        turns[0] = [*text, *pictures]
    for content in turns:
        if not content or (isinstance(content, str) and not content.strip()):
            message = f"{where} has an empty or non-text prompt"
            raise UsageError(message, "turns, content and prompt are non-empty strings")
    return Question(
        id=conversation.id or str(index),
        category=conversation.category or "all",
        turns=tuple(turns),
        opening=tuple(messages[:first]),
        tools=conversation.tools,
    )


def spread(questions: list[Question], samples: int | None) -> list[Question]:
    """Returns `samples` questions, taken round-robin over categories. All if `samples` is None.

    A small sample covers all categories as far as it can.
    """
    if samples is None or samples >= len(questions):
        return list(questions)
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    rounds = chain.from_iterable(zip_longest(*groups.values()))
    return [question for question in rounds if question is not None][:samples]


# --- rows of the sets that are known by name ---


@dataclass(frozen=True, kw_only=True)
class QuestionSource:
    """Where questions come from.

    With `hub`: an entry of data/datasets.yaml, read from the hub or from a `file` of its form.
    Without: any file, directory or hub id. `configs` are read one after the other, `others` only
    when they are named. `fields`: names of the data set's fields. `placeholder`: text of a row that
    must be prepared first, and `prepare` says how.
    """

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
    """Returns the sets that are known by name."""
    known = data_files.load_yaml("datasets.yaml")["datasets"]
    return {name: QuestionSource(label=name, **entry) for name, entry in known.items()}


def locate(text: str) -> QuestionSource:
    """Returns the source that a text names. Raises UsageError if no source matches.

    `text`: `nano`, a path that exists, a known name (`NAME[:CONFIG][=FILE]`) or a hub id.
    """
    if text == NANO:
        path = data_files.kimi_nano_dir() / "prompts_heldout.jsonl"
        return QuestionSource(label=NANO, file=str(path))
    if user_path(text).exists():
        return QuestionSource(label=Path(text).name, file=str(user_path(text)))
    match = NAMED.fullmatch(text)
    name, config, file = match.groups() if match else ("", "", "")
    source = catalogue().get(name)
    if source:
        if config:
            source = _only(source, config)
        if file and not user_path(file).exists():
            raise missing(file, f"`dataset` {name} alone reads the hub")
        label, _, _ = text.partition("=")
        return replace(source, label=label, file=file or "")
    if from_hub(text):
        return QuestionSource(label=text, file=text)
    remedy = (
        "pass a data file, a hub id org/name, nano, "
        f"or one of {', '.join(catalogue())}, alone or as NAME=FILE"
    )
    if Path(text).suffix in SUFFIXES:
        raise missing(text, remedy)
    raise UsageError(
        f"there is no file and no data set {text}", did_you_mean(text, catalogue(), remedy)
    )


def _only(source: QuestionSource, config: str) -> QuestionSource:
    """The source with this configuration alone.

    Raises UsageError if it has no such configuration.
    """
    configs = [*source.configs, *source.others]
    if config not in configs:
        message = f"the data set {source.label} has no configuration {config}"
        raise UsageError(message, f"it has {', '.join(configs) or 'none'}")
    category = source.category
    # the configurations of a set that is read in several are its categories
    if not category and len(source.configs) > 1:
        category = config
    return replace(source, configs=[config], category=category)


def rows_of(source: QuestionSource) -> Iterator[DataRow]:
    """Yields the rows of a source with the reader's fields, each with its pictures.

    Raises UsageError.
    """
    if source.file:
        for row in read_rows(source.file):
            yield with_known_fields(row, source) if source.hub else row
        return
    if not source.configs:
        yield from _hub_rows(source, source.hub)
    for config in source.configs:
        yield from _hub_rows(_only(source, config), f"{source.hub}:{config}")


def _hub_rows(source: QuestionSource, name: str) -> Iterator[DataRow]:
    """The rows of one configuration. `name`: as the hub reader takes it."""
    for row in hub_rows(name, source.split, source.revision):
        value = dict(row.value)
        # the hub reader puts the split's name where a row has no category
        if value.get("category") == source.split:
            del value["category"]
        yield with_known_fields(replace(row, value=value), source)


def with_known_fields(row: DataRow, source: QuestionSource) -> DataRow:
    """Returns a row of a known set with the fields that `conversations` reads, and its `images`.

    A row without the fields that make its question is read as in any file. Raises UsageError if it
    has neither, or if its text is only a placeholder.
    """
    value = row.value
    fields = source.fields
    if not isinstance(value, dict):
        return row
    if source.placeholder and source.placeholder in json.dumps(value, default=str):
        message = f"{CODE} {row.where} holds a placeholder instead of the text"
        raise UsageError(message, source.prepare)
    image_field = fields.get("images")
    images: dict[str, Any] = {}
    if image_field in value:
        images = {"images": value[image_field]}
    template = fields.get("template", "")
    turns = fields.get("turns", "")
    parsed = string.Formatter().parse(template)
    names = [name for _, name, _, _ in parsed if name] or [turns]
    absent = [name for name in names if name not in value]
    if absent:
        if not any(key in value for key in LISTS):
            raise _no_field(row, " and no ".join(absent), source)
        others = {key: item for key, item in value.items() if key != image_field}
        return replace(row, value={"category": source.category, **others, **images})
    question: dict[str, Any] = {}
    if turns:
        question = {"turns": value[turns]}
    if template:
        texts = {name: _field_text(row, value[name], name, source) for name in names}
        question = {"prompt": template.format(**texts).strip()}
    usual_id = next((key for key in IDS if key in value), "")
    id_field = fields.get("id") or usual_id
    category = value.get(fields.get("category", "category")) or source.category
    known = {**question, **images, "id": value.get(id_field), "category": category}
    stated = {key: item for key, item in known.items() if item is not None}
    return replace(row, value=stated)


def _field_text(row: DataRow, item: Any, name: str, source: QuestionSource) -> str:
    """The text of one field of a question. Raises UsageError if it is empty, or not text."""
    if item is None or (isinstance(item, str) and not item.strip()):
        raise _no_field(row, name, source)
    if not isinstance(item, (str, int)) or isinstance(item, bool):
        message = f"{CODE} {row.where} has a {name} that is not text"
        raise UsageError(message, f"write {name} as a string")
    return str(item)


def _no_field(row: DataRow, names: str, source: QuestionSource) -> UsageError:
    message = f"{CODE} {row.where} has no {names}, which rows of {source.title} have"
    return UsageError(message, f"the fields are listed at {source.source}")


def _picture(row: DataRow, image: Any) -> Message:
    """Returns a picture as a part of a message.

    Bytes become a data: URL. Raises UsageError if it is no picture.
    """
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:image/")):
        return {"type": "image_url", "image_url": {"url": image}}
    data: Any = image
    if isinstance(image, dict):
        data = image.get("bytes")
    # an image as the datasets library decodes it
    if hasattr(data, "save"):
        buffer = io.BytesIO()
        data.save(buffer, format="PNG")
        data = buffer.getvalue()
    for magic, image_type in IMAGE_TYPES:
        if isinstance(data, bytes) and data.startswith(magic):
            url = f"data:image/{image_type};base64,{base64.b64encode(data).decode()}"
            return {"type": "image_url", "image_url": {"url": url}}
    message = (
        f"{CODE} {row.where} has an image that is neither a URL nor PNG, JPEG, GIF or WebP bytes"
    )
    raise UsageError(message, "give a URL, a data: URL, or the bytes of a picture")
