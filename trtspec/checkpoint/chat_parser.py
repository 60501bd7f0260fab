"""Parses and writes Kimi answers: reasoning between think tags, content, and a tool-call section.

A section is `<|tool_calls_section_begin|>`, the calls and `<|tool_calls_section_end|>`. A call is
`<|tool_call_begin|>functions.{name}:{index}`, `<|tool_call_argument_begin|>`, JSON and
`<|tool_call_end|>`. The beginning of a section also ends the reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

END_OF_TURN = "<|im_end|>"  # after each turn
THINK = "<think>"
THINK_END = "</think>"
SECTION = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
MARKS = (THINK, THINK_END, SECTION, SECTION_END, CALL_BEGIN, ARGUMENTS, CALL_END)
CALL = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>[^<\s]+)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
# beginning of a call that reached its arguments
CUT_OFF = re.compile(r"<\|tool_call_begin\|>\s*[^<\s]+\s*<\|tool_call_argument_begin\|>")
CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?$")


def parse_reply(text: str, thinking: bool) -> dict[str, Any]:
    """Returns a complete answer as an OpenAI message.

    The message has role and content, and reasoning_content and tool_calls if the answer has them.

    `thinking`: whether the prompt already opened the think tag.
    """
    parser = ReplyParser(thinking)
    deltas = parser.push(text) + parser.finish()
    calls = [delta.call.to_dict() for delta in deltas if delta.call]
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning_content")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


class ReplyParser:
    """Splits an answer into reasoning, content and tool calls while its text grows.

    thinking: whether the prompt already opened the think tag.
    state: type of the text at the current position.
    calls: number of complete tool calls so far.
    """

    def __init__(self, thinking: bool) -> None:
        self.state: Literal["reasoning_content", "content", "tools"] = "content"
        if thinking:
            self.state = "reasoning_content"
        self._pending = ""
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        """Adds text and returns the deltas that it completes.

        A tool call is returned as one delta after its end mark.
        """
        self._pending += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Returns the deltas of the remaining text at the end of the answer.

        A tool call that was cut off in its arguments is returned with the arguments so far. Any
        other unfinished tool-call section becomes content.
        """
        text = self._pending
        self._pending = ""
        if self.state != "tools":
            return [Delta(self.state, text)] if text else []
        if CUT_OFF.search(text):
            return [self._call(text + CALL_END)]
        return [Delta("content", text)] if text.strip() else []

    def _advance(self, deltas: list[Delta]) -> bool:
        """Handles the text up to the next mark. Returns False if more text is needed."""
        if self.state == "tools":
            return self._advance_tools(deltas)
        marks = (THINK, SECTION)
        if self.state == "reasoning_content":
            marks = (THINK_END, SECTION)
        positions = [(self._pending.find(mark), mark) for mark in marks if mark in self._pending]
        if not positions:
            # The last characters may be the beginning of a mark.
            self._take(len(self._pending) - held_back(self._pending, marks), deltas)
            return False
        position, mark = min(positions)
        self._take(position, deltas)
        self._pending = self._pending[len(mark) :]
        states = {THINK: "reasoning_content", THINK_END: "content", SECTION: "tools"}
        self.state = states[mark]  # type: ignore[assignment]
        return True

    def _advance_tools(self, deltas: list[Delta]) -> bool:
        """Handles one tool call, or the end of the section.

        Returns False if more text is needed.
        """
        call_end = self._pending.find(CALL_END)
        section_end = self._pending.find(SECTION_END)
        if section_end >= 0 and (call_end < 0 or section_end < call_end):
            self._pending = self._pending[section_end + len(SECTION_END) :]
            self.state = "content"
            return True
        if call_end < 0:
            return False
        size = call_end + len(CALL_END)
        call_text = self._pending[:size]
        self._pending = self._pending[size:]
        deltas.append(self._call(call_text))
        return True

    def _take(self, size: int, deltas: list[Delta]) -> None:
        """Moves the next `size` characters to `deltas`."""
        text = self._pending[:size]
        self._pending = self._pending[size:]
        if text and self.state != "tools":
            deltas.append(Delta(self.state, text))

    def _call(self, text: str) -> Delta:
        """Returns the delta of one tool call.

        `text`: text of the call up to its end mark. It becomes content if it is not a call.
        """
        match = CALL.search(text)
        if match is None:
            return Delta("content", text)
        name = CALL_ID.sub(r"\g<name>", match["id"])
        call = ToolCall(match["id"], name, match["arguments"].strip())
        self.calls += 1
        return Delta("tool_call", call=call, index=self.calls - 1)


@dataclass(frozen=True)
class Delta:
    """Part of an answer: text of reasoning or content, or one complete tool call.

    index: number of the tool call in the answer, from 0.
    """

    kind: Literal["reasoning_content", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None
    index: int = 0


@dataclass(frozen=True)
class ToolCall:
    """Tool call as the model wrote it.

    id: text `functions.{name}:{index}`.
    arguments: arguments as JSON text.
    """

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as an entry of OpenAI's `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def held_back(text: str, stop: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may be the beginning of a stop string."""
    # A complete stop string is found elsewhere, so only shorter beginnings count.
    longest = min(len(text), max(len(word) for word in stop) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(word.startswith(tail) for word in stop):
            return size
    return 0


def reply_text(message: dict[str, Any], opened: bool, tags: bool) -> str:
    """Returns an answer as the model writes it, from which `parse_reply` makes the message.

    Args:
        message: the OpenAI message of the answer.
        opened: whether the prompt ends in an open think tag.
        tags: whether the answer has think tags.
    """
    reasoning = ""
    if tags:
        reasoning = f"{message.get('reasoning_content', '')}{THINK_END}"
        if not opened:
            reasoning = THINK + reasoning
    text = reasoning + (message.get("content") or "")
    if not message.get("tool_calls"):
        return text
    calls = [
        f"{CALL_BEGIN}{call['id']}{ARGUMENTS}{call['function']['arguments']}{CALL_END}"
        for call in message["tool_calls"]
    ]
    return f"{text}{SECTION}{''.join(calls)}{SECTION_END}"


def call_id(name: str, index: int) -> str:
    """Returns the id of a tool call. `index` counts the calls of the conversation from 0."""
    return f"functions.{name}:{index}"
