"""Reasoning, content and tool calls of Kimi's answers, whole and in every split of a stream."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.checkpoint.chat_parser import Delta, ReplyParser, parse_reply

SECTION = (
    "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
ANSWERS = [
    ("plain <b>text</b> < |", False),
    ("let me think</think>The answer", True),
    ("never closed", True),
    ("<think>own tag</think>answer", False),
    (f"I look it up.{SECTION}", False),
    (f"hm{SECTION}", True),
    (f"{SECTION} after", False),
    (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
        False,
    ),
    ("<|tool_calls_section_begin|>garbage<|tool_call_end|><|tool_calls_section_end|>", False),
]


def test_calls_and_reasoning() -> None:
    message = parse_reply(f"two things</think>Looking.{SECTION}", thinking=True)
    assert message["reasoning_content"] == "two things"
    assert message["content"] == "Looking."
    assert [call["id"] for call in message["tool_calls"]] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


def test_a_section_ends_reasoning() -> None:
    message = parse_reply(f"need a tool{SECTION}", thinking=True)
    assert message["reasoning_content"] == "need a tool"
    assert message["content"] is None and len(message["tool_calls"]) == 2


def test_names_with_dots_and_without_prefix() -> None:
    def name(call_id: str) -> str:
        call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        text = f"<|tool_calls_section_begin|>{call}"
        return parse_reply(text, False)["tool_calls"][0]["function"]["name"]

    assert name("functions.mcp.files.read:12") == "mcp.files.read"
    assert name("search:0") == "search"
    assert name("search") == "search"


@pytest.mark.parametrize(
    "begun", ["<|tool_call_begin|>functions.f", "<|tool_call_begin|>", "garbage<|tool_call_end|>"]
)
def test_nothing_is_swallowed(begun: str) -> None:
    """A section without a call comes back as content."""
    message = parse_reply(f"<|tool_calls_section_begin|>{begun}", thinking=False)
    assert "tool_calls" not in message and begun in message["content"]


@pytest.mark.parametrize("arguments", ["", "{", '{"city": "Par'])
def test_a_call_that_was_cut_off_is_partial(arguments: str) -> None:
    section = SECTION.replace("<|tool_calls_section_end|>", "")
    text = f"{section}<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{arguments}"
    message = parse_reply(text, thinking=False)
    assert message["content"] is None
    assert [call["id"] for call in message["tool_calls"]][2:] == ["functions.f:2"]
    assert message["tool_calls"][2]["function"] == {"name": "f", "arguments": arguments}


def joined(deltas: list[Delta]) -> list[tuple[str, object]]:
    """Deltas with neighbouring texts of one kind put together."""
    result: list[tuple[str, object]] = []
    for delta in deltas:
        if delta.call is None and result and result[-1][0] == delta.kind:
            result[-1] = (delta.kind, str(result[-1][1]) + delta.text)
        else:
            result.append((delta.kind, delta.call or delta.text))
    return result


@settings(max_examples=200)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(1, 9)))
def test_any_split_gives_the_same(answer: tuple[str, bool], sizes: list[int]) -> None:
    text, thinking = answer
    whole, parts = ReplyParser(thinking), ReplyParser(thinking)
    expected = whole.push(text) + whole.finish()
    deltas: list[Delta] = []
    rest = text
    for size in [*sizes, len(text)]:
        deltas += parts.push(rest[:size])
        rest = rest[size:]
    assert joined(deltas + parts.finish()) == joined(expected)
