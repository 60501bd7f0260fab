"""Prompts to be answered, each with an id of its text alone: what stands before each answer of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.errors import UsageError

REMEDY = "each row has prompt, messages, conversations or turns, or is one plain-text prompt"


@dataclass(frozen=True)
class Prompt:
    """`turns` are the messages before each answer: a system message, if any, stands with the first user turn, and a
    tool call of the source with its result stands before the answer that it led to."""

    id: str
    turns: tuple[tuple[dict[str, Any], ...], ...]
    category: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def seed(self) -> int:
        """Of the sampling: the same prompt gets the same seed in every run and shard."""
        return int(self.id[:8], 16) % 2**31


def read_prompts(source: Path | str, split: str | None = None, limit: int = 0) -> list[Prompt]:
    """Prompts of a file, a directory or a hub data set (see `read_conversations`), in order, each text once, at most
    `limit` (0: all). Answers in it are dropped. Raises UsageError naming the row that is no prompt."""
    found = list(islice(distinct(read_conversations(source, split)), limit or None))
    if not found:
        raise UsageError(f"TS-PROMPTS-EMPTY {source} holds no prompt", REMEDY)
    return found


def distinct(conversations: Iterable[Conversation]) -> Iterator[Prompt]:
    """The prompt of each conversation, the first of equal ones."""
    seen = set()
    for conversation in conversations:
        prompt = prompt_of(conversation)
        if prompt.id not in seen:
            seen.add(prompt.id)
            yield prompt


def prompt_of(conversation: Conversation) -> Prompt:
    """Raises UsageError (TS-PROMPTS-ROW) where nobody asks anything."""
    turns = tuple(tuple(turn) for turn in _turns(conversation))
    if not turns:
        raise UsageError(f"TS-PROMPTS-ROW {conversation.where}: no user turn to answer", REMEDY)
    digest = hashlib.sha256(json.dumps([turns, conversation.tools], sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(digest, turns, conversation.category, conversation.tools)


def _turns(conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
    """The user's side of a conversation, cut into what precedes each answer."""
    pending: list[dict[str, Any]] = []
    for message in conversation.chat:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        answered = message["role"] == "assistant" and not message.get("tool_calls")
        if answered and pending and pending[-1]["role"] in ("user", "tool"):
            yield pending
            pending = []
        elif not answered and (message["role"] != "system" or message["content"]):
            if message["role"] == "user" and pending and pending[-1]["role"] in ("user", "tool"):
                yield pending  # a source without answers: each question gets one
                pending = []
            pending.append(message)
    if pending and pending[-1]["role"] in ("user", "tool"):
        yield pending


def shard(prompts: list[Prompt], text: str | None) -> list[Prompt]:
    """`i/n` (i from 0): the prompts whose id falls to part i, so that shards never overlap whatever is added."""
    if text is None:
        return prompts
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise UsageError(f"--shard {text!r} is not i/n with 0 <= i < n", "for example --shard 0/4")
    return [prompt for prompt in prompts if int(prompt.id, 16) % count == index]
