"""Reads the questions of bench and check from a file or a hub data set.

The turns of a question are sent one after another, each with the model's answers to the earlier
turns. data/datasets.yaml lists data sets with names. The fields of their rows get the names that
the reader of conversations expects.
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

NANO = "nano"  # name of the held-out prompts of the built-in model kimi-nano
# fields of a row that contain a question in any data file
QUESTION_FIELDS = ("messages", "conversations", "conversation", "turns", "prompt")
# name of a known data set, with an optional configuration and file
NAMED = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<config>[\w.-]+))?(?:=(?P<file>.+))?")
# fields of a recorded request that are not sent
NOT_REPLAYED = ("stream", "stream_options", "category", "timestamp")
LATE_TURN = 4  # this and all later turns form one category
# first bytes of a picture, and its type
IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
Message = dict[str, Any]
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """Conversation that is held with a server: the user's turns, and what precedes them.

    turns: content of each message of the user, text or a list of content parts
    opening: messages before the first turn, or all messages of a recorded request
    tools: functions that the request offers
    body: JSON of a recorded request, which has no turns and is sent unchanged
    sent_ms: field `timestamp` of a recorded request, in milliseconds
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
        """Number of requests that the conversation takes: one per turn."""
        return len(self.turns) or 1

    @property
    def has_pictures(self) -> bool:
        """Whether a message consists of content parts, such as pictures."""
        contents = [message.get("content") for message in self.opening]
        return any(isinstance(content, list) for content in (*contents, *self.turns))

    def first_request(self) -> tuple[list[Message], list[Message]]:
        """Returns the messages of the first request, and its tools."""
        return self.request(0), list(self.tools)

    def request(self, turn: int) -> list[Message]:
        """Returns the messages that a turn adds to the conversation. `turn`: index of the turn."""
        # a recorded request has no turns, only its opening
        messages = [{"role": "user", "content": content} for content in self.turns[turn : turn + 1]]
        return messages if turn else [*self.opening, *messages]


@dataclass(frozen=True)
class Dataset:
    """Data set as read: its questions, or a sample of them.

    name: name under which results state the data set
    sha256: digest of the file, or of all questions if there is no single file
    licence: licence of the data set, None if it is not known
    source: web page of the data set, None if it is not known
    """

    name: str
    sha256: str
    questions: tuple[Question, ...]
    licence: str | None = None
    source: str | None = None

    @property
    def recorded(self) -> list[Message]:
        """JSON of each recorded request in the data set."""
        return [question.body for question in self.questions if question.body]

    def recorded_rate(self) -> float:
        """Returns the requests per second as recorded. Raises UsageError if a row has no time."""
        times = [question.sent_ms for question in self.questions]
        if not all(isinstance(time, (int, float)) for time in times):
            remedy = "give each row a `timestamp` in milliseconds, or leave out `recorded_times`"
            raise UsageError(f"{self.name} has rows without a time", remedy)
        # at least a second, because a shorter time gives no meaningful rate
        duration_ms: float = max(max(times) - min(times), 1000)
        return len(times) * 1000 / duration_ms


def load_dataset(name: str, samples: int | None = None) -> Dataset:
    """Reads the questions of a data set, or a sample of them.

    Raises UsageError if the data set is not found, or if a row has no question that can be sent.

    Args:
        name: Known name, data file, directory or hub id. `nano` is the held-out prompts of
            kimi-nano.
        samples: Number of questions, taken evenly from the categories. None for all questions.
    """
    source = locate(name)
    file = source.file
    questions = read_questions(source)
    if not questions:
        message = f"the dataset {file or name} holds no prompt"
        raise UsageError(message, "write each line as a JSON object with turns, messages or prompt")
    if file and Path(file).is_file():
        digest = file_sha256(Path(file))
    # a directory or a hub data set has no single file
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

    If two rows have one id, the id of the later question gets the index of its row. Raises
    UsageError if only some of the rows are recorded requests, or if a row lacks its pictures.
    """
    unread = Counter[str]()  # fields that are ignored, which are reported at the end
    questions: list[Question] = []
    seen = set()
    for index, row in enumerate(rows_of(source)):
        question = recorded_request(row, index) or asked_by(row, index, unread)
        # recorded requests have their own sampling parameters, so one run cannot have both
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
    """Reads a recorded chat or completions request. None if the row is not a request.

    The row is the JSON of the request, or has it in `body`, as a line of a batch file does. A
    request with messages is put in a category by its number of user messages. Raises UsageError if
    the request asks for several answers. `index`: index of the row, which is the default id.
    """
    value = row.value if isinstance(row.value, dict) else {}
    body = value.get("body", value)
    # a row with an answer or an id is a line of a data set that names its model
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
    # messages that end in an answer are a question with its answer, unless a batch file has them
    if body is value and opening[-1].get("role") == "assistant":
        return None
    # a list of integers is one prompt as token ids, any other list is several prompts
    has_prompts = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    if has_prompts or any(body.get(key) not in (None, 1) for key in ("n", "best_of")):
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
    """Reads the question of a row that is not a recorded request, with the pictures in `images`.

    `index`: index of the row, which is the default id. `unread`: numbers of rows by ignored field,
    updated here. Raises UsageError if the row has no question that can be sent.
    """
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
    """Returns the question at the end of a conversation: the user's last messages.

    The messages before them are the opening. An answer at the end is dropped. Raises UsageError if
    the conversation does not end in a question that can be sent.

    Args:
        index: Index of the row, which is the default id.
        pictures: Content parts that are appended to the first turn.
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
        remedy = "give each row a prompt, turns, or messages that end with a user's message"
        raise UsageError(f"{where} {ends}", remedy)
    turns = [message["content"] for message in messages[first:]]
    if pictures:
        text = [{"type": "text", "text": turns[0]}] if turns[0] else []
        turns[0] = [*text, *pictures]
    for content in turns:
        if not content or (isinstance(content, str) and not content.strip()):
            message = f"{where} has an empty or non-text prompt"
            raise UsageError(message, "write turns, content and prompt as non-empty strings")
    return Question(
        id=conversation.id or str(index),
        category=conversation.category or "all",
        turns=tuple(turns),
        opening=tuple(messages[:first]),
        tools=conversation.tools,
    )


def spread(questions: list[Question], samples: int | None) -> list[Question]:
    """Returns `samples` questions, taken in turn from each category. All if `samples` is None.

    A small sample then covers as many categories as possible.
    """
    if samples is None or samples >= len(questions):
        return list(questions)
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    rounds = chain.from_iterable(zip_longest(*groups.values()))
    return [question for question in rounds if question is not None][:samples]


# --- rows of the data sets that data/datasets.yaml knows by name ---


@dataclass(frozen=True, kw_only=True)
class QuestionSource:
    """Source of questions: a file, a directory, a hub id, or an entry of data/datasets.yaml.

    label: name of the source in results
    file: path or hub id, "" to read an entry from `hub`
    title: full name of the data set
    hub: hub id of an entry of data/datasets.yaml, "" for other sources
    licence: licence of the data set
    source: web page of the data set
    revision: revision of the hub data set
    split: split of the hub data set
    configs: configurations that are read one after another
    others: configurations that are read only if the user names one
    fields: names of the data set's own fields, by purpose
    category: category of rows without one
    placeholder: text that shows that a row must be prepared first
    prepare: remedy that says how rows are prepared
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
    """Returns the entries of data/datasets.yaml by name."""
    entries = data_files.load_yaml("datasets.yaml")["datasets"]
    return {name: QuestionSource(label=name, **entry) for name, entry in entries.items()}


def locate(text: str) -> QuestionSource:
    """Finds the source of questions that the user names. Raises UsageError if no source matches.

    `text`: `nano`, an existing path, a known name as NAME[:CONFIG][=FILE], or a hub id.
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
    """Returns the source restricted to one configuration.

    Raises UsageError if the source has no such configuration.
    """
    configs = [*source.configs, *source.others]
    if config not in configs:
        message = f"the data set {source.label} has no configuration {config}"
        raise UsageError(message, f"it has {', '.join(configs) or 'none'}")
    category = source.category
    # if several configurations are read, they are the categories
    if not category and len(source.configs) > 1:
        category = config
    return replace(source, configs=[config], category=category)


def rows_of(source: QuestionSource) -> Iterator[DataRow]:
    """Yields the rows of a source, with the field names that the conversation reader expects.

    Raises UsageError if the source cannot be read, or if a row has no question.
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
    """Yields the rows of one configuration of a hub data set. `name`: hub id and configuration."""
    for row in hub_rows(name, source.split, source.revision):
        value = dict(row.value)
        # the hub reader writes the name of the split into a row without a category
        if value.get("category") == source.split:
            del value["category"]
        yield with_known_fields(replace(row, value=value), source)


def with_known_fields(row: DataRow, source: QuestionSource) -> DataRow:
    """Returns a row of a known data set with the field names that the conversation reader expects.

    A row without the data set's own fields keeps its names, if it has a question like any data
    file. Raises UsageError if it has no question, or if its text is a placeholder.
    """
    value = row.value
    fields = source.fields
    # a row that is not an object has no fields to rename
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
    # a question is the text of a template, or a field with all turns
    names = [name for _, name, _, _ in parsed if name] or [turns]
    missing_names = [name for name in names if name not in value]
    if missing_names:
        if not any(key in value for key in QUESTION_FIELDS):
            raise _no_field(row, " and no ".join(missing_names), source)
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
    renamed = {**question, **images, "id": value.get(id_field), "category": category}
    # a row without an id has no field for it
    present = {key: item for key, item in renamed.items() if item is not None}
    return replace(row, value=present)


def _field_text(row: DataRow, item: Any, name: str, source: QuestionSource) -> str:
    """Returns the text of one field of a question.

    `item`: value of the field. Raises UsageError if it is empty, or neither text nor an integer.
    """
    if item is None or (isinstance(item, str) and not item.strip()):
        raise _no_field(row, name, source)
    if not isinstance(item, (str, int)) or isinstance(item, bool):
        message = f"{CODE} {row.where} has a {name} that is not text"
        raise UsageError(message, f"write {name} as a string")
    return str(item)


def _no_field(row: DataRow, names: str, source: QuestionSource) -> UsageError:
    """Returns the error of a row that lacks fields. `names`: their names, in words."""
    message = f"{CODE} {row.where} has no {names}, which rows of {source.title} have"
    return UsageError(message, f"look up the fields at {source.source}")


def _picture(row: DataRow, image: Any) -> Message:
    """Returns a picture as a content part of a message. Bytes become a data: URL.

    `image`: URL, bytes, an object with `bytes`, or a PIL image. Raises UsageError for another type,
    or if the format of the picture is unknown.
    """
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:image/")):
        return {"type": "image_url", "image_url": {"url": image}}
    data: Any = image
    if isinstance(image, dict):
        data = image.get("bytes")
    # the datasets library decodes images to PIL objects
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
