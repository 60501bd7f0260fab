"""Reads conversations for calibrate, synthesize, train and bench. A row may have these fields:

    messages, conversations, conversation   a list of {role, content} or ShareGPT's {from, value}
    turns                                   a list of questions (MT-Bench), or of {text} (AIPerf)
    prompt | question                       a question, or a list of messages
      with response | answer | output | completion    ... and its answer
    text                                    raw text, without a chat template

`system` or `system_prompt` precedes a conversation. `tools` is a list or JSON text of a list, in a
field of the row or of its `metadata`. The reader counts unknown fields and lists them in one note.
It refuses, with file and line, an unknown role and a field that would change what a model learns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import files
from trtspec.checkpoint.chat_parser import (
    MARKS,
    THINK,
    THINK_END,
    call_id,
    parse_reply,
    reply_text,
)
from trtspec.checkpoint.data_rows import CODE, DataRow, read_rows
from trtspec.data_files import DATA
from trtspec.errors import UsageError
from trtspec.report import note

# OpenAI's role for each role that rows have
ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function_response": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
# Keys of a row, by what they hold. The first of BODIES and of IDS that a row has is read.
LISTS = ("messages", "conversations", "conversation")
QUESTIONS = ("prompt", "question")
BODIES = (*LISTS, "turns", *QUESTIONS, "text")
ANSWERS = ("response", "answer", "output", "completion")
SYSTEM = ("system", "system_prompt")
IDS = ("conversation_id", "question_id", "id", "prompt_id", "task_id", "uuid", "session_id")
PICTURES = ("image_url", "video_url")  # types of parts in a message's content
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
# values of a row's `status` if a server gave no answer
FAILED = ("error", "failed", "failure", "timeout", "cancelled")
# keys that describe a row and do not change its conversation
METADATA = (
    *IDS, "category", "finish_reason", "metadata", "source", "dataset", "split", "language",
    "license", "reference", "tools", "status", "error",
)  # fmt: skip
# Keys by which a trainer leaves text out of the loss, or of OpenAI's older form of tool calls. They
# are refused unless their value is 1, which leaves nothing out.
ROW_REFUSED = ("weight", "loss_weight", "loss_mask", "functions")
MESSAGE_REFUSED = ("weight", "train", "loss", "loss_weight", "loss_mask", "function_call")
MAX_FIELDS_NAMED = 12
REMEDY = (
    "each row has messages (of the roles system, user, assistant and tool), conversations, turns, "
    "prompt with or without completion or response, or text"
)
Message = dict[str, Any]


def read_conversations(source: Path | str, split: str | None = None) -> Iterator[Conversation]:
    """Yields the conversations of a file, a directory or a hub data set in order.

    Prints one note with the unread fields at the end. Raises UsageError (TS-DATA-ROW), with file
    and line, if a row is invalid.
    """
    unread: Counter[str] = Counter()
    try:
        for row in read_rows(str(source), split):
            yield conversation(row, unread)
    finally:
        note_unread(source, unread)


@dataclass(frozen=True)
class Conversation:
    """Conversation of one row in OpenAI's form, or a raw text.

    file, line: place of the row.
    messages: objects with role and content, and optionally reasoning_content, tool_calls,
        tool_call_id and name. A content is a text, or a list of parts if it has pictures.
    text: raw text of a row without messages.
    tools: tools that the conversation may call.
    failure: reason why a server gave no answer. "" if the row states none.
    """

    file: str
    line: int
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    id: str = ""
    category: str = ""
    finish_reason: str = ""
    failure: str = ""

    @property
    def where(self) -> str:
        """Text FILE:LINE for messages."""
        return f"{self.file}:{self.line}"


def conversation(row: DataRow, unread: Counter[str], pictures: bool = False) -> Conversation:
    """Returns the conversation of one row. Raises UsageError if the row is invalid.

    Args:
        unread: counter of fields that are not read, which is updated.
        pictures: whether the content of a message may be a list of parts with pictures.
    """
    try:
        if not isinstance(row.value, dict):
            raise ValueError("is not an object")
        fields = {key: value for key, value in row.value.items() if value is not None}
        return _conversation(row, fields, unread, pictures)
    except ValueError as error:
        raise UsageError(f"{CODE} {row.where} {error}", REMEDY) from None


def _conversation(
    row: DataRow, fields: dict[str, Any], unread: Counter[str], pictures: bool
) -> Conversation:
    """Returns the conversation of one row. Raises ValueError if the row is invalid.

    `fields`: keys of the row that are not null.
    """
    _refuse(fields, ROW_REFUSED)
    # Any other status, such as "ok" or a number, does not mean that the answer failed.
    status = str(fields.get("status", "")).lower()
    failed_status = status if status in FAILED else ""
    read = {*METADATA, *ROW_REFUSED}
    text, messages = _body(fields, read, unread)
    if messages:
        messages = _with_system(fields, messages)
        read.update(SYSTEM)
    tools = fields.get("tools")
    metadata = _parsed(fields.get("metadata"))
    if not tools and isinstance(metadata, dict):
        # NVIDIA's Nemotron data sets have tools in `metadata`, which is a plain text in others.
        tools = metadata.get("tools")
    with_parts = [message for message in messages if not isinstance(message["content"], str)]
    if with_parts and not pictures:
        raise ValueError(f"has content with {' or '.join(PICTURES)}, and only text is read")
    # An empty field has nothing that could be read.
    unread.update(key for key in fields if key not in read and fields[key] not in ("", [], {}))
    return Conversation(
        row.file,
        row.line,
        tuple(with_call_ids(messages)),
        text,
        tools=tuple(_objects(tools or [], "tools")),
        id=next((str(fields[key]) for key in IDS if key in fields), ""),
        category=str(fields.get("category", "")),
        finish_reason=str(fields.get("finish_reason", "")),
        failure=str(fields.get("error") or failed_status),
    )


def _refuse(fields: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raises ValueError if one of `keys` would change what a model learns from the row."""
    for key in keys:
        if fields.get(key, 1) != 1:
            value = str(fields[key])[:40]
            raise ValueError(f"has {key}: {value}, which is not read: leave it out, or the row")


def _body(
    fields: dict[str, Any], read: set[str], unread: Counter[str]
) -> tuple[str, list[Message]]:
    """Returns the row's raw text and its messages. A row has only one, so the other is empty.

    Adds the keys of the text or messages to `read`. Raises ValueError if the row has neither, or if
    keys contradict each other.
    """
    keys = [key for key in BODIES if key in fields]
    if not keys:
        raise ValueError(f"has none of {', '.join(BODIES)}, only {sorted(fields)}")
    body_key = keys[0]
    value = fields[body_key]
    read.add(body_key)
    if body_key == "text":
        return _text(value, body_key), []
    if body_key in LISTS:
        others = [key for key in keys if key in LISTS and fields[key] != value]
        if others:
            raise ValueError(f"has {body_key} and {others[0]}, which differ: leave one of them")
        read.update(LISTS)
        return "", _messages(_items(value, body_key), unread)
    if body_key == "turns":
        return "", [_question(turn, unread) for turn in _items(value, body_key)]
    answers = [key for key in ANSWERS if key in fields]
    if len(answers) > 1:
        raise ValueError(f"has {' and '.join(answers)}, several answers: leave one of them")
    read.update(answers)
    if isinstance(value, list):
        for key in answers:
            value = value + _items(fields[key], key)
        return "", _messages(value, unread)
    question = _question(value, unread)
    replies = [{"role": "assistant", "content": _text(fields[key], key)} for key in answers]
    return "", [question, *replies]


def _text(value: Any, key: str) -> str:
    """Returns the value if it is text. Raises ValueError if it is not."""
    if not isinstance(value, str):
        raise ValueError(f"has {key} that is {type(value).__name__}, not text")
    return value


def _items(value: Any, key: str) -> list[Any]:
    """Returns the items of a list, or of JSON text of a list.

    Raises ValueError if the list is empty or the value is not a list.
    """
    items = _parsed(value)
    if not isinstance(items, list) or not items:
        raise ValueError(f"has {key} that are not a list, or an empty list")
    return items


def _parsed(value: Any) -> Any:
    """Returns the value of JSON text, None for other text, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return files.parse_json(value)
    except ValueError:
        return None


def _question(value: Any, unread: Counter[str]) -> Message:
    """Returns the message of a question, which is a text or an object with the key `text`.

    Counts other keys of the object in `unread`. Raises ValueError if the text is empty.
    """
    fields = value if isinstance(value, dict) else {"text": value}
    text = fields.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("has an empty or non-text prompt")
    unread.update(f"turns[].{key}" for key in fields.keys() - {"text"})
    return {"role": "user", "content": text}


def _messages(items: list[Any], unread: Counter[str]) -> list[Message]:
    """Returns the messages in OpenAI's form. Counts each unread key once in `unread`."""
    unread_keys: set[str] = set()
    messages = [_message(item, unread_keys) for item in items]
    unread.update(f"messages[].{key}" for key in unread_keys)
    return messages


def _message(value: Any, unread: set[str]) -> Message:
    """Returns a message in OpenAI's form from OpenAI's or ShareGPT's form.

    Adds the keys that are not read to `unread`. Raises ValueError if the message is invalid.
    """
    if not isinstance(value, dict):
        raise ValueError("has a message that is not an object")
    fields = {key: item for key, item in value.items() if item is not None}
    _refuse(fields, MESSAGE_REFUSED)
    role_key = "role" if "role" in fields else "from"
    stated_role = fields.get(role_key, "")
    role = ROLES.get(str(stated_role))
    if role is None:
        known = ", ".join(ROLES)
        raise ValueError(f"has a message of the role {stated_role!r}, which is not one of {known}")
    content_key = "content" if "content" in fields else "value"
    read = {role_key, content_key, "tool_call_id", "name", *MESSAGE_REFUSED}
    content = _joined(fields.get(content_key, ""), "content")
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        message = answer_of({**fields, **message})
        read |= {*REASONING, "tool_calls"}
    # An answer may consist of reasoning or tool calls alone.
    if content_key not in fields and message.keys() <= {"role", "content"}:
        raise ValueError(f"has a message of the role {role} without content")
    for key in ("tool_call_id", "name"):
        if fields.get(key):
            message[key] = _text(fields[key], key)
    stated = {key for key, item in fields.items() if item not in ("", [], {})}
    unread |= stated - read
    return message


def _joined(value: Any, key: str) -> str | list[dict[str, Any]]:
    """Returns the text of a content, or its list of parts if some are pictures.

    Text parts are joined without a separator, as the family's templates write them.
    """
    if not isinstance(value, list):
        return _text(value, key)
    parts: list[dict[str, Any]] = []
    texts = []
    for item in value:
        fields = item if isinstance(item, dict) else {"text": item}
        part = {"type": "text", **fields}
        parts.append(part)
        part_type = part["type"]
        if part_type not in PICTURES:
            where = f"{key} with a part of the type {part_type!r}"
            texts.append(_text(part.get("text"), where))
    return "".join(texts) if len(texts) == len(parts) else parts


def answer_of(fields: dict[str, Any]) -> Message:
    """Returns an assistant's message with reasoning and tool calls in OpenAI's keys.

    Reasoning and calls may be in keys of the message, or in the content as the model writes them.
    Raises ValueError if two places contradict each other, or if no model writes such a content.

    `fields`: keys of the message that are not null.
    """
    content = _text(fields.get("content") or "", "content")
    calls = _calls(fields.get("tool_calls") or [])
    reasoning = {key: _text(_joined(fields[key], key), key) for key in REASONING if fields.get(key)}
    if any(mark in content for mark in MARKS):
        before, tag, _ = content.partition(THINK_END)
        tags = bool(tag)
        opened = tags and THINK not in before
        parsed = parse_reply(content, opened)
        # Writing the parsed answer again must give the content, or parsing lost text.
        if calls or reply_text(parsed, opened, tags) != content:
            reason = "has marks of reasoning or tool calls in its content as no model writes them"
            raise ValueError(reason)
        content = parsed["content"] or ""
        calls = parsed.get("tool_calls", [])
        if "reasoning_content" in parsed:
            reasoning["content"] = parsed["reasoning_content"]
    distinct = set(reasoning.values())
    if len(distinct) > 1:
        raise ValueError(f"has reasoning in {' and '.join(reasoning)}, which differ")
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = next(iter(reasoning.values()))
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(value: Any) -> list[dict[str, Any]]:
    """Returns the tool calls of a list, or of JSON text of a list, with arguments as JSON text.

    Raises ValueError if a call is invalid.
    """
    calls = _objects(value, "tool_calls")
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
            raise ValueError("has tool_calls without function.name or function.arguments")
        _text(function["name"], "function.name")  # raises ValueError if the name is not text
        arguments = function["arguments"]
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function["arguments"] = _text(arguments, "function.arguments")
    return calls


def _with_system(fields: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Returns the messages after the row's system prompt, if the row has such a key.

    Raises ValueError if the messages begin with another system prompt.
    """
    for key in SYSTEM:
        text = _text(fields.get(key, ""), key)
        if text and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": text}, *messages]
        elif text and messages[0]["content"] != text:
            raise ValueError(f"has {key} and another system message: leave one of them")
    return messages


def with_call_ids(messages: list[Message]) -> list[Message]:
    """Returns the messages with ids of tool calls in the family's form, `functions.NAME:INDEX`.

    INDEX counts the calls of the whole conversation (vLLM's `get_history_tool_calls_cnt`). Results
    get the ids of their calls. Ids that already have the right names are unchanged.
    """
    calls: list[dict[str, Any]] = []
    for message in messages:
        calls += message.get("tool_calls", ())
    ids = [call_id(call["function"]["name"], index) for index, call in enumerate(calls)]
    # Only the part before the index is compared, because indices may count from another number.
    stems = [identity.rpartition(":")[0] for identity in ids]
    stated_stems = [str(call.get("id")).rpartition(":")[0] for call in calls]
    if stated_stems == stems:
        return messages
    unused = iter(ids)
    # new ids by the row's ids, of calls that have no result yet
    waiting: dict[str, str] = {}
    renamed = []
    for message in messages:
        if "tool_calls" in message:
            named = [{**call, "id": next(unused)} for call in message["tool_calls"]]
            pairs = zip(message["tool_calls"], named, strict=True)
            waiting = {str(old.get("id") or new["id"]): new["id"] for old, new in pairs}
            message = {**message, "tool_calls": named}
        if message["role"] == "tool" and waiting:
            # A result without an id belongs to the first call that has no result.
            old_id = message.get("tool_call_id") or next(iter(waiting))
            message = {**message, "tool_call_id": waiting.pop(old_id, old_id)}
        renamed.append(message)
    return renamed


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    """Returns a list of objects, or the value of JSON text of such a list.

    Raises ValueError for every other value.
    """
    items = _parsed(value)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"has {key} that are not a list of objects, or JSON text of such a list")
    return items


def note_unread(source: Path | str, unread: Counter[str]) -> None:
    """Prints one note with the fields that are not read, and the number of rows that have each.

    Prints nothing about data that is part of trtspec.
    """
    if unread and not Path(source).is_relative_to(DATA):
        counts = sorted(unread.items())
        named = ", ".join(f"{name} ({count:,})" for name, count in counts[:MAX_FIELDS_NAMED])
        if len(unread) > MAX_FIELDS_NAMED:
            named += f" and {len(unread) - MAX_FIELDS_NAMED} more"
        note(f"{source} has fields that are not read, with the number of rows: {named}")
