"""What a Kimi answer is made of: reasoning between think tags, content, and a tool-call section.

A section reads `<|tool_calls_section_begin|>`, then per call `<|tool_call_begin|>functions.{name}:{index}`,
`<|tool_call_argument_begin|>`, JSON, `<|tool_call_end|>`, then `<|tool_calls_section_end|>`; it also ends reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

END_OF_TURN = "<|im_end|>"  # behind each turn
THINK, THINK_END = "<think>", "</think>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKS = (THINK, THINK_END, SECTION, SECTION_END, CALL_BEGIN, ARGUMENTS, CALL_END)
CALL = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>[^<\s]+)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
CUT_OFF = re.compile(r"<\|tool_call_begin\|>\s*[^<\s]+\s*<\|tool_call_argument_begin\|>")
CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?$")


def call_id(name: str, index: int) -> str:
    """Id of a call as the family writes it. `index` counts the calls of the whole conversation from 0."""
    return f"functions.{name}:{index}"


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it: `id` is `functions.{name}:{index}`, `arguments` JSON text."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: text of reasoning or content, or the `index`-th tool call, whole."""

    kind: Literal["reasoning_content", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None
    index: int = 0


class ReplyParser:
    """Splits an answer's text as it grows. `thinking`: the prompt already opened the think tag."""

    def __init__(self, thinking: bool) -> None:
        self.state: Literal["reasoning_content", "content", "tools"] = (
            "reasoning_content" if thinking else "content"
        )
        self._pending = ""
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        """Pieces that are certain now; a tool call comes out whole, when its end is seen."""
        self._pending += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What is left at the end. A call that was cut off in its arguments is a call with as much of them as there is;
        anything else of an unfinished tool-call section is given back as content."""
        rest, self._pending = self._pending, ""
        if self.state == "tools":
            if CUT_OFF.search(rest):
                return [self._call(rest + CALL_END)]
            return [Delta("content", rest)] if rest.strip() else []
        return [Delta(self.state, rest)] if rest else []

    def _advance(self, deltas: list[Delta]) -> bool:
        """Handles the text up to the next mark; False when more text is needed."""
        if self.state == "tools":
            return self._advance_tools(deltas)
        marks = (THINK_END, SECTION) if self.state == "reasoning_content" else (THINK, SECTION)
        found = min(
            ((self._pending.find(mark), mark) for mark in marks if mark in self._pending),
            default=None,
        )
        if found is None:
            self._take(len(self._pending) - held_back(self._pending, marks), deltas)
            return False
        position, mark = found
        self._take(position, deltas)
        self._pending = self._pending[len(mark) :]
        self.state = {THINK: "reasoning_content", THINK_END: "content", SECTION: "tools"}[mark]  # type: ignore[assignment]
        return True

    def _take(self, size: int, deltas: list[Delta]) -> None:
        text, self._pending = self._pending[:size], self._pending[size:]
        if text and self.state != "tools":
            deltas.append(Delta(self.state, text))

    def _advance_tools(self, deltas: list[Delta]) -> bool:
        end, close = self._pending.find(CALL_END), self._pending.find(SECTION_END)
        if close >= 0 and (end < 0 or close < end):
            self._pending = self._pending[close + len(SECTION_END) :]
            self.state = "content"
            return True
        if end < 0:
            return False
        written, self._pending = (
            self._pending[: end + len(CALL_END)],
            self._pending[end + len(CALL_END) :],
        )
        deltas.append(self._call(written))
        return True

    def _call(self, written: str) -> Delta:
        """The call that was written, up to its end mark; what is none is content."""
        match = CALL.search(written)
        if match is None:
            return Delta("content", written)
        name = CALL_ID.sub(r"\g<name>", match["id"])
        call = ToolCall(match["id"], name, match["arguments"].strip())
        self.calls += 1
        return Delta("tool_call", call=call, index=self.calls - 1)


def parse_reply(text: str, thinking: bool) -> dict[str, Any]:
    """A whole answer as an OpenAI message: role, content, reasoning_content and tool_calls where there are any."""
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


def reply_text(message: dict[str, Any], opened: bool, tags: bool) -> str:
    """Returns an answer as the model writes it: the inverse of `parse_reply`.

    Args:
        opened: the prompt ends in an open think tag.
        tags: the answer has think tags.
    """
    thought = f"{message.get('reasoning_content', '')}{THINK_END}"
    begin = THINK if tags and not opened else ""
    text = begin + (thought if tags else "") + (message.get("content") or "")
    if not message.get("tool_calls"):
        return text
    calls = [
        f"{CALL_BEGIN}{call['id']}{ARGUMENTS}{call['function']['arguments']}{CALL_END}"
        for call in message["tool_calls"]
    ]
    return f"{text}{SECTION}{''.join(calls)}{SECTION_END}"


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = min(len(text), max(len(word) for word in stop) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(word.startswith(tail) for word in stop):
            return size
    return 0
