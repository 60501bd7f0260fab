"""The one reader of conversations, for calibrate, synthesize, train and bench. A row may have any of these fields:

    messages, conversations, conversation   a list of {role, content} or ShareGPT's {from, value}
    turns                                   a list of questions (MT-Bench), or of {text} (AIPerf)
    prompt | question                       a question
      with response | answer | output       ... and its answer
    prompt, completion                      raw text and its continuation, without a chat template; of messages: joined
    text                                    raw text
    a JSON string, a line of a text file    bare text, which a caller may take for a question

`system` or `system_prompt` precedes a conversation. `tools` is a field of its own, a list or JSON text of one, or
inside `metadata`. The reader counts fields that it does not know and names them in one note. It refuses, with file and
line, an unknown role and a field that would change what is learned.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trtspec.checkpoint.chat_parser import (
    MARKS,
    THINK,
    THINK_END,
    call_id,
    parse_reply,
    reply_pieces,
)
from trtspec.checkpoint.rows import CODE, DataRow, read_rows
from trtspec.data_files import DATA
from trtspec.errors import UsageError
from trtspec.report import note

ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function_response": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
LISTS = ("messages", "conversations", "conversation")
QUESTIONS, ANSWERS, CONTINUATION = (
    ("prompt", "question"),
    ("response", "answer", "output"),
    "completion",
)
SYSTEM = ("system", "system_prompt")
IDS = ("conversation_id", "question_id", "id", "prompt_id", "task_id", "uuid", "session_id")
PICTURES = ("image_url", "video_url")  # types of a part of a message
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
FAILED = ("error", "failed", "failure", "timeout", "cancelled")  # of a row's `status`
# what describes a row and changes nothing that is made of it
ABOUT = (*IDS, "category", "finish_reason", "metadata", "source", "dataset", "split", "language", "license",
         "reference")  # fmt: skip
MASKS = (
    "weight",
    "train",
    "loss",
    "loss_weight",
    "loss_mask",
)  # of a message: whether a trainer should learn it
ROW_MASKS = ("weight", "loss_weight", "loss_mask")
REMEDY = "each row has messages, conversations, turns, prompt with or without completion or response, or text"
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One row in OpenAI's words. Either `messages` ({role, content}, and where set reasoning_content, tool_calls,
    tool_call_id, name), or raw `text` with its `completion`; `bare` text stood alone. Content is text, or with pictures
    a list of parts."""

    file: str
    line: int
    messages: tuple[Message, ...] = ()
    text: str = ""
    completion: str | None = None
    bare: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    id: str = ""
    category: str = ""
    finish_reason: str = ""
    failure: str = ""  # why a server gave no answer, where the row says so

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def chat(self) -> tuple[Message, ...]:
        """The messages; bare text and the prompt of a raw pair as a question. Empty for raw text."""
        if self.bare or self.completion is not None:
            return ({"role": "user", "content": self.text},)
        return self.messages


def read_conversations(source: Path | str, split: str | None = None) -> Iterator[Conversation]:
    """The conversations of a file, a directory or a hub data set (see `rows.read_rows`), in order.

    Raises UsageError (TS-DATA-ROW) with file and line for an invalid row. Fields that
    are not read are named in one note when the reading ends.
    """
    unread: Counter[str] = Counter()
    try:
        for row in read_rows(str(source), split):
            yield conversation(row, unread)
    finally:
        note_unread(source, unread)


def note_unread(source: Path | str, unread: Counter[str]) -> None:
    """One note for the fields that a data set has and nothing honours, with the number of rows."""
    if unread and not Path(source).is_relative_to(
        DATA
    ):  # what ships with trtspec is known to be read right
        named = ", ".join(f"{name} ({count:,})" for name, count in sorted(unread.items())[:12])
        more = f" and {len(unread) - 12} more" if len(unread) > 12 else ""
        note(f"{source} has fields that are not read, with the number of rows: {named}{more}")


def conversation(row: DataRow, unread: Counter[str], pictures: bool = False) -> Conversation:
    """One row read. Counts in `unread` the fields that it has and nothing honours. With `pictures` the content of a
    message may be a list of parts; without, such a row is refused."""
    if isinstance(row.value, str):
        return Conversation(row.file, row.line, text=row.value, bare=True)
    if not isinstance(row.value, dict):
        _refuse(row, "is neither an object nor a string", REMEDY)
    fields = {key: value for key, value in row.value.items() if value is not None}
    _refuse_masks(row, fields, ROW_MASKS)
    read = {*ABOUT, "tools", "status", "error", *ROW_MASKS}
    status = str(fields.get("status", "")).lower()
    about: dict[str, Any] = {
        "tools": _tools(row, fields),
        "id": next((str(fields[key]) for key in IDS if key in fields), ""),
        "category": str(fields.get("category", "")),
        "finish_reason": str(fields.get("finish_reason", "")),
        "failure": str(fields.get("error") or (status if status in FAILED else "")),
    }
    found = _body(row, fields, read, unread)
    if "messages" in found:
        shown = [
            message["content"]
            for message in found["messages"]
            if not isinstance(message["content"], str)
        ]
        if shown and not pictures:
            kind = next(part["type"] for part in shown[0] if part["type"] != "text")
            _refuse(
                row,
                f"has content with a part of the type {kind!r}, and only text is read",
                "leave the row out",
            )
        messages = _with_system(row, fields, found["messages"], read)
        found["messages"] = tuple(with_call_ids(messages))
    unread.update(key for key in fields if key not in read and fields[key] not in ("", [], {}))
    return Conversation(row.file, row.line, **found, **about)


def _body(
    row: DataRow, fields: dict[str, Any], read: set[str], unread: Counter[str]
) -> dict[str, Any]:
    """`messages`, or `text` with or without `completion`; adds the keys that made them to `read`."""
    lists = [key for key in LISTS if key in fields]
    if len(lists) > 1 and any(fields[key] != fields[lists[0]] for key in lists):
        _refuse(row, f"has {' and '.join(lists)}, which differ", "leave one of them")
    if lists:
        read.update(lists)
        return {"messages": _messages(row, _items(row, fields, lists[0]), unread)}
    if "turns" in fields:
        read.add("turns")
        turns = _items(row, fields, "turns")
        for turn in turns:
            more = turn.keys() - {"text"} if isinstance(turn, dict) else ()
            unread.update(f"turns[].{key}" for key in more)
        texts = [turn.get("text") if isinstance(turn, dict) else turn for turn in turns]
        return {"messages": [_question(row, text) for text in texts]}
    asked = next((key for key in QUESTIONS if key in fields), None)
    if asked:
        return _pair(row, fields, asked, read, unread)
    if "text" in fields:
        read.add("text")
        return {"text": _text(row, fields["text"], "text")}
    _refuse(
        row,
        f"has none of {', '.join((*LISTS, 'turns', *QUESTIONS, 'text'))}, only {sorted(fields)}",
        REMEDY,
    )


def _pair(
    row: DataRow, fields: dict[str, Any], asked: str, read: set[str], unread: Counter[str]
) -> dict[str, Any]:
    """A question, with its answer or continuation where there is one."""
    answers = [key for key in (*ANSWERS, CONTINUATION) if key in fields]
    if len(answers) > 1:
        _refuse(row, f"has {' and '.join(answers)}: several answers", "leave one of them")
    read |= {asked, *answers}
    prompt, answer = fields[asked], fields[answers[0]] if answers else None
    if isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt):
        answered = _items(row, fields, answers[0]) if answers else []
        return {"messages": _messages(row, [*prompt, *answered], unread)}
    question = _question(row, prompt)
    if answers == [CONTINUATION]:
        return {"text": question["content"], "completion": _text(row, answer, CONTINUATION)}
    if answers:
        return {
            "messages": [question, {"role": "assistant", "content": _text(row, answer, answers[0])}]
        }
    return {"messages": [question]}


def _question(row: DataRow, value: Any) -> Message:
    if not isinstance(value, str) or not value.strip():
        _refuse(
            row,
            "has an empty or non-text prompt",
            "a prompt or a turn is a string with something in it",
        )
    return {"role": "user", "content": value}


def _text(row: DataRow, value: Any, key: str) -> str:
    if not isinstance(value, str):
        _refuse(
            row, f"has {key} that is {type(value).__name__}, not text", f"write {key} as a string"
        )
    return value


def _items(row: DataRow, fields: dict[str, Any], key: str) -> list[Any]:
    value = fields[key]
    if not isinstance(value, list) or not value:
        _refuse(
            row,
            f"has {key} that are no list, or an empty one",
            f"write {key}: [...] with one item at least",
        )
    return value


def _messages(row: DataRow, items: list[Any], unread: Counter[str]) -> list[Message]:
    odd: set[str] = set()
    found = [_message(row, item, odd) for item in items]
    unread.update(f"messages[].{key}" for key in odd)
    return found


def _message(row: DataRow, value: Any, odd: set[str]) -> Message:
    """A message in OpenAI's keys, whichever of the two namings it has. Adds the keys that it does not know to `odd`."""
    if not isinstance(value, dict):
        _refuse(row, "has a message that is no object", "each message is {role: ..., content: ...}")
    fields = {key: item for key, item in value.items() if item is not None}
    _refuse_masks(row, fields, MASKS)
    if "function_call" in fields:
        _refuse(row, "has a message with function_call, OpenAI's older form", "write tool_calls")
    named = "role" if "role" in fields else "from"
    role = ROLES.get(str(fields.get(named, "")))
    if role is None:
        known = ", ".join(ROLES)
        _refuse(
            row, f"has a message of the role {fields.get(named, '')!r}", f"the roles are {known}"
        )
    content = "content" if "content" in fields else "value"
    message: Message = {"role": role, "content": _content(row, fields.get(content, ""))}
    if role == "assistant":
        try:
            message = answer_of({**fields, **message})
        except ValueError as error:
            _refuse(row, str(error), "write content, reasoning_content and tool_calls apart")
    if content not in fields and message.keys() <= {"role", "content"}:
        _refuse(
            row,
            f"has a message of the role {role} without content",
            "each message is {role: ..., content: ...}",
        )
    for key in ("tool_call_id", "name"):
        if fields.get(key):
            message[key] = _text(row, fields[key], key)
    read = {named, content, "tool_call_id", "name", *MASKS}
    read |= {*REASONING, "tool_calls"} if role == "assistant" else set()
    odd |= {key for key, item in fields.items() if item not in ("", [], {})} - read
    return message


def answer_of(fields: dict[str, Any]) -> Message:
    """Returns an assistant's message in one form, wherever its reasoning and its calls are.

    Raises ValueError with the reason if two places differ, or the text is not one that a model writes.
    """
    content = fields.get("content") or ""
    if not isinstance(content, str):
        raise ValueError("has an answer that is not text")
    calls = _calls(fields.get("tool_calls") or [])
    reasoning = {key: _reasoning(key, fields[key]) for key in REASONING if fields.get(key)}
    if any(mark in content for mark in MARKS):
        head, end, _ = content.partition(THINK_END)
        opened = bool(end) and THINK not in head
        parsed = parse_reply(content, opened)
        tags = "reasoning_content" in parsed or bool(end)
        if calls or "".join(reply_pieces(parsed, opened, tags)) != content:
            raise ValueError(
                "has marks of reasoning or tool calls in its content that are no answer's"
            )
        content, calls = parsed["content"] or "", parsed.get("tool_calls", [])
        if "reasoning_content" in parsed:
            reasoning["content"] = parsed["reasoning_content"]
    if len(set(reasoning.values())) > 1:
        raise ValueError(f"has reasoning in {' and '.join(reasoning)}, which differ")
    message: Message = {"role": "assistant", "content": content}
    message |= {"reasoning_content": next(iter(reasoning.values()))} if reasoning else {}
    return message | ({"tool_calls": calls} if calls else {})


def _calls(value: Any) -> list[dict[str, Any]]:
    """Calls of a list, or of JSON text of one, their arguments as JSON text."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        functions = [call["function"] for call in calls]
        named = all(isinstance(function["name"], str) for function in functions)
    except (KeyError, TypeError, ValueError, RecursionError):
        named = False
    if not named:
        raise ValueError("has tool_calls that are no list of calls with function.name")
    for function in functions:
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return calls


def _reasoning(key: str, value: Any) -> str:
    """Text, or the texts of a list of {type: reasoning.text, text}."""
    parts = value if isinstance(value, list) else [{"text": value}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"has {key} that is not text")
    return "".join(map(str, texts))


def with_call_ids(messages: list[Message]) -> list[Message]:
    """Returns the messages with call ids as the family writes them, unless all are; results with those of their calls.

    INDEX counts the calls of the whole conversation (vLLM's `get_history_tool_calls_cnt`).
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    forms = (re.escape(call_id(call["function"]["name"], 0)[:-1]) + r"\d+" for call in calls)
    if all(
        re.fullmatch(form, str(call.get("id"))) for form, call in zip(forms, calls, strict=True)
    ):
        return messages
    count = 0
    waiting: dict[str, str] = {}  # id of the row -> id of the family, of calls without a result
    renamed = []
    for message in messages:
        if "tool_calls" in message:
            waiting, own = {}, []
            for call in message["tool_calls"]:
                identity = call_id(call["function"]["name"], count)
                waiting[str(call.get("id") or identity)] = identity
                own.append({**call, "id": identity})
                count += 1
            message = {**message, "tool_calls": own}
        if message["role"] == "tool" and waiting:
            old = message.get("tool_call_id") or next(iter(waiting))
            message = {**message, "tool_call_id": waiting.pop(old, old)}
        renamed.append(message)
    return renamed


def _content(row: DataRow, value: Any) -> str | list[dict[str, Any]]:
    """Text; a list of text parts is joined, as the templates of the family print it. A list with pictures stays."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(
            row,
            f"has content that is {type(value).__name__}, not text",
            "write content as a string",
        )
    parts = [part if isinstance(part, dict) else {"text": part} for part in value]
    for part in parts:
        kind = part.setdefault("type", "text")
        if kind not in PICTURES and (kind != "text" or not isinstance(part.get("text"), str)):
            _refuse(
                row,
                f"has content with a part of the type {kind!r}, and only text is read",
                "leave the row out",
            )
    return (
        parts
        if any(part["type"] in PICTURES for part in parts)
        else "".join(part["text"] for part in parts)
    )


def _tools(row: DataRow, fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A list, or JSON text of one; Nemotron's sets keep it inside `metadata`."""
    if fields.get("functions"):
        _refuse(row, "has functions, OpenAI's older form", "write tools")
    found, metadata = fields.get("tools"), fields.get("metadata")
    if not found and metadata:
        try:
            metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        except ValueError:
            return ()  # a remark, not a structure
        found = metadata.get("tools") if isinstance(metadata, dict) else None
    return tuple(_parsed_list(row, found, "tools")) if found else ()


def _parsed_list(row: DataRow, value: Any, key: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        _refuse(
            row,
            f"has {key} that are no list of objects",
            f"write {key}: [{{...}}], or JSON text of it",
        )
    return found


def _with_system(
    row: DataRow, fields: dict[str, Any], messages: list[Message], read: set[str]
) -> list[Message]:
    """The messages behind the row's own system prompt, where it has one that they do not begin with."""
    for key in SYSTEM:
        if key in fields:
            read.add(key)
            text = _text(row, fields[key], key)
            first = messages[0]
            if first["role"] == "system" and first["content"] != text and text:
                _refuse(row, f"has {key} and another system message", "leave one of them")
            if text and first["role"] != "system":
                messages = [{"role": "system", "content": text}, *messages]
    return messages


def _refuse_masks(row: DataRow, fields: dict[str, Any], masks: tuple[str, ...]) -> None:
    for key in masks:
        if fields.get(key, 1) != 1:
            _refuse(row, f"has {key}: {str(fields[key])[:40]}, and no part of a row is left out of the loss",
                    "leave the field out, or the row")  # fmt: skip


def _refuse(row: DataRow, reason: str, remedy: str) -> NoReturn:
    raise UsageError(f"{CODE} {row.where} {reason}", remedy)
