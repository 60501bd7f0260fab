"""Renders conversations to token ids: prompts as a server gets them, and the answers of the target.

An answer follows the prompt that the template renders from the messages before it. The template may
render an earlier answer as history in another way than the target wrote it, for example without its
reasoning. The conversation then has several renderings. Each answer is parsed again and compared
with its row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from trtspec.checkpoint.chat_parser import (
    END_OF_TURN,
    MARKS,
    THINK,
    THINK_END,
    parse_reply,
    reply_text,
)
from trtspec.checkpoint.conversations import Conversation, Message
from trtspec.checkpoint.data_rows import CODE
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.report import note


@dataclass(frozen=True)
class Rendering:
    """Token ids of a conversation.

    tokens: ids of all tokens.
    answer: 1 for each token that the target wrote, else 0.
    prompt: number of tokens before the last answer.
    repeated: number of tokens at the beginning that an earlier rendering of the same messages has.
    """

    tokens: list[int]
    answer: list[int]
    prompt: int
    repeated: int = 0


def render(conversation: Conversation, tokenizer: KimiTokenizer) -> list[Rendering]:
    """Returns one rendering, or several if the history of a later answer differs from its text.

    Raises UsageError, with file and line, if a server failed to answer the row, or if the template
    does not read its tool calls. Also raises it if the parsed answer is not the row's.
    """
    if not conversation.messages:
        tokens = tokenizer.encode(conversation.text)
        return [Rendering(tokens, [0] * len(tokens), len(tokens))]
    # `tools_ts_str` is text that the tokenizer's own code writes, which is not run.
    if conversation.tools and "tools_ts_str" in tokenizer.template.variables:
        _note_tools(tokenizer.template.where)
    try:
        if conversation.failure:
            raise TrtspecError(f"has no answer: {conversation.failure:.80}", "")
        _require_calls(conversation, tokenizer.template.names)
        return _render_messages(conversation, tokenizer)
    except TrtspecError as error:
        remedy = "correct the row, or leave it out"
        raise UsageError(f"{CODE} {conversation.where} {error.message}", remedy) from None


@cache
def _note_tools(where: str) -> None:
    """Prints, once for each template, that tools are rendered as JSON."""
    fact = "reads tools as the tokenizer's code writes them"
    note(f"{where} {fact}; it is not run, so they are JSON")


def _require_calls(conversation: Conversation, names: frozenset[str]) -> None:
    """Raises TrtspecError if the template does not read tool calls or results of the row.

    Also raises it if a result has no call. `names`: keys that the template reads.
    """
    calls: set[str] = set()
    for message in conversation.messages:
        unread = message.keys() & {"tool_calls", "tool_call_id"} - names
        if unread:
            raise TrtspecError(f"has {min(unread)}, which the chat template does not read", "")
        if message["role"] == "tool" and message.get("tool_call_id") not in calls:
            raise TrtspecError("has a tool's result without the call that it answers", "")
        calls.update(call["id"] for call in message.get("tool_calls", ()))


def _render_messages(conversation: Conversation, tokenizer: KimiTokenizer) -> list[Rendering]:
    """Returns the renderings of a conversation with messages.

    Raises TrtspecError if a parsed answer is not the row's.
    """
    messages = conversation.messages
    tools = list(conversation.tools) or None
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if messages[-1]["role"] != "assistant":
        answers.append(len(messages))  # The row lacks the last answer, so its prompt is the end.
    # Starts with an empty rendering, which the first prompt continues.
    renderings = [Rendering([], [], 0)]
    for number, index in enumerate(answers):
        reply = messages[index] if index < len(messages) else {}
        thinking = "reasoning_content" in reply
        text, prompt = tokenizer.encode_chat(messages[:index], tools, thinking=thinking)
        answer_ids: list[int] = []
        if reply:
            cut = index == len(messages) - 1 and conversation.finish_reason == "length"
            answer_ids = _answer_ids(reply, text, tokenizer, cut)
        last = renderings.pop()
        repeated = last.repeated
        mask = last.answer
        # A new rendering replaces the last one if its prompt continues it. Otherwise both remain.
        if prompt[: len(last.tokens)] != last.tokens:
            renderings.append(last)
            history = messages[: answers[number - 1] + 1]
            _, history_ids = tokenizer.encode_chat(history, tools, add_generation_prompt=False)
            repeated = len(os.path.commonprefix([history_ids, prompt]))
            mask = []
        new_prompt_tokens = len(prompt) - len(mask)
        mask = mask + [0] * new_prompt_tokens + [1] * len(answer_ids)
        start = len(prompt) if reply else last.prompt
        renderings.append(Rendering(prompt + answer_ids, mask, start, repeated))
    return renderings


def _answer_ids(reply: Message, prompt: str, tokenizer: KimiTokenizer, cut: bool) -> list[int]:
    """Returns the token ids of an answer as the target writes it.

    Raises TrtspecError if the parsed answer has other reasoning, content or calls than the row.

    Args:
        reply: message of the answer.
        prompt: text before the answer.
        cut: whether the limit of tokens ended the answer, so that it has no end mark.
    """
    opened = prompt.rstrip().endswith(THINK)
    closed = prompt.rstrip().endswith(THINK_END)
    tags = opened or (not closed and THINK in tokenizer.template.source)
    text = reply_text(reply, opened, tags)
    # The target may not have reached the marks after the last text.
    while cut and text.endswith(MARKS):
        text = text[: text.rindex("<")]
    ids = tokenizer.encode(text, marks=MARKS)
    parsed = parse_reply(tokenizer.decode(ids), opened)
    expected = _parts(reply)
    differing = [name for name, part in _parts(parsed).items() if part != expected[name]]
    if differing:
        fields = " and ".join(differing)
        raise TrtspecError(f"has {fields} that the chat template and the parser change", "")
    return ids if cut else [*ids, tokenizer.special_id(END_OF_TURN)]


def _parts(message: Message) -> dict[str, Any]:
    """Returns reasoning, content and calls of a message in a form that can be compared, by name."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        calls.append((call["id"], function["name"], function["arguments"].strip()))
    return {
        "reasoning": message.get("reasoning_content", ""),
        "content": message.get("content") or "",
        "tool calls": calls,
    }
