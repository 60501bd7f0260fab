"""Texts as token ids, from jsonl rows of many shapes or from plain text: what a calibration runs the target on.

Raw text and whole conversations with their answers, one row one text; `heads/data/prompts.py` reads the other half,
what the user said before each answer, and asks the target for the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtspec import files
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
REMEDY = "each line: {text}, {messages}, {conversations}, {prompt}, {prompt, completion}, {turns}, or one text"
MIN_TOKENS = 2


def read_texts(path: Path, tokenizer: KimiTokenizer, samples: int, seq_len: int) -> list[tuple[int, ...]]:
    """The first `samples` rows of `path` as token ids, each cut to `seq_len`; answers in a conversation are kept.

    A .jsonl row with `text`, or with `prompt` and `completion`, is raw text; `messages`, `conversations`, `turns` and a
    lone `prompt` go through the chat template, with the generation prompt when the user speaks last. Any other file is
    one raw text per line. Rows of fewer than 2 tokens are passed over. Raises TrtspecError naming the row that is none
    of these, UsageError when there is nothing to read.
    """
    try:
        lines = files.read_text(path, remedy=REMEDY).splitlines()
    except FileNotFoundError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", REMEDY) from None
    found: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, 1):
        if len(found) == samples:
            break
        if not line.strip():
            continue
        row = _row(line, path, number) if path.suffix in (".jsonl", ".json") else {"text": line}
        ids = _tokens(row, tokenizer, f"{path}:{number}")[:seq_len]
        if len(ids) >= MIN_TOKENS:
            found.append(tuple(ids))
    if not found:
        raise UsageError(f"{path} holds no text", REMEDY)
    return found


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = files.parse_json(line)
    except ValueError as error:
        raise TrtspecError(f"{path}:{number}: not JSON ({error})", "repair or remove the line") from None
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise TrtspecError(f"{path}:{number}: neither an object nor a string", REMEDY)
    return row


def _tokens(row: dict[str, Any], tokenizer: KimiTokenizer, where: str) -> list[int]:
    try:
        if "text" in row:
            return tokenizer.encode(row["text"])
        if "completion" in row:
            return tokenizer.encode(row["prompt"] + row["completion"])
        messages = _messages(row)
        asked = messages[-1]["role"] != "assistant"
        return tokenizer.apply_chat_template(messages, row.get("tools"), add_generation_prompt=asked)
    except (KeyError, TypeError, IndexError, AttributeError):
        raise TrtspecError(f"{where}: no text in keys {sorted(row)}", REMEDY) from None


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if "prompt" in row:
        return [{"role": "user", "content": row["prompt"]}]
    if "turns" in row:
        return [{"role": "user", "content": turn} for turn in row["turns"]]
    messages = []
    for message in row.get("messages") or row["conversations"]:
        role = message.get("role") or message["from"]
        content = message["content"] if "content" in message else message["value"]
        messages.append({**message, "role": ROLES.get(role, role), "content": content})
    return messages
