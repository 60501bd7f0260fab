"""Prompts to be answered: read from many shapes, each with an id that depends on its text alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError, UsageError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
REMEDY = "each line: {prompt}, {messages}, {conversations}, {turns}, or one plain-text prompt"


@dataclass(frozen=True)
class Prompt:
    """`turns` are the messages before each answer: a system message, if any, stands with the first user turn."""

    id: str
    turns: tuple[tuple[dict[str, str], ...], ...]
    category: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def seed(self) -> int:
        """Of the sampling: the same prompt gets the same seed in every run and shard."""
        return int(self.id[:8], 16) % 2**31


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a .jsonl or plain-text file (one per line), in order, each text once. Answers in it are dropped.

    Raises TrtspecError naming the line that is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}", REMEDY) from None
    plain = path.suffix not in (".jsonl", ".json")
    found: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _prompt({"prompt": line} if plain else _row(line, path, number), path, number)
        found.setdefault(prompt.id, prompt)
    if not found:
        raise UsageError(f"TS-PROMPTS-EMPTY {path} holds no prompt", REMEDY)
    return list(found.values())


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrtspecError(f"TS-PROMPTS-ROW {path}:{number}: not JSON ({error})", REMEDY) from None
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, dict):
        raise TrtspecError(f"TS-PROMPTS-ROW {path}:{number}: neither an object nor a string", REMEDY)
    return row


def _prompt(row: dict[str, Any], path: Path, number: int) -> Prompt:
    try:
        turns = tuple(tuple(turn) for turn in _turns(row))
    except (KeyError, TypeError, AttributeError):
        turns = ()
    if not turns:
        raise TrtspecError(f"TS-PROMPTS-ROW {path}:{number}: no user turn in keys {sorted(row)}", REMEDY)
    tools = tuple(row.get("tools") or ())
    digest = hashlib.sha256(json.dumps([turns, tools], sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(digest, turns, str(row.get("category") or ""), tools)


def _turns(row: dict[str, Any]) -> Iterator[list[dict[str, str]]]:
    """The user's side of a conversation, cut into what precedes each answer."""
    if isinstance(row.get("prompt"), str):
        yield [{"role": "user", "content": row["prompt"]}]
        return
    if "turns" in row:
        yield from ([{"role": "user", "content": turn}] for turn in row["turns"])
        return
    pending: list[dict[str, str]] = []
    for message in row.get("messages") or row["conversations"]:
        role = ROLES[message.get("role") or message["from"]]
        content = message["content"] if "content" in message else message["value"]
        if role == "assistant":
            continue
        pending.append({"role": role, "content": content})
        if role == "user":
            yield pending
            pending = []


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
