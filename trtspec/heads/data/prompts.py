"""Prompts to be answered, each with an id of its text alone: the user's side of the rows of a jsonl file, a JSON array,
parquet, plain text, a directory of these, or a hub data set.

`checkpoint/texts.py` reads conversations for calibration: whole ones, with their answers, as token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trtspec.checkpoint.hub import HUB_ID
from trtspec.errors import MissingDependency, TrtspecError, UsageError

REMEDY = "each line: {prompt}, {messages}, {conversations}, {turns}, or one plain-text prompt"
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
EXTRA = "pip install 'trtspec[modelopt]'"
Rows = Iterator[tuple[str, Any]]  # where a row stands, for messages; a JSON value

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "tool": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip
MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name")


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
    """Prompts of a file, a directory or a hub data set (see `read_rows`), in order, each text once, at most
    `limit` (0: all). Answers in it are dropped. Raises TrtspecError naming the row that is no prompt."""
    found = list(islice(_distinct(read_rows(str(source), split)), limit or None))
    if not found:
        raise UsageError(f"TS-PROMPTS-EMPTY {source} holds no prompt", REMEDY)
    return found


def _distinct(rows: Rows) -> Iterator[Prompt]:
    seen = set()
    for where, row in rows:
        prompt = _prompt({"prompt": row} if isinstance(row, str) else row, where)
        if prompt.id not in seen:
            seen.add(prompt.id)
            yield prompt


def _prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise TrtspecError(f"TS-PROMPTS-ROW {where}: neither an object nor a string", REMEDY)
    try:
        turns = tuple(tuple(turn) for turn in _turns(row))
        tools = _tools(row)
    except (KeyError, TypeError, AttributeError, ValueError):
        turns, tools = (), ()
    if not turns:
        raise TrtspecError(f"TS-PROMPTS-ROW {where}: no user turn in keys {sorted(row)}", REMEDY)
    digest = hashlib.sha256(json.dumps([turns, tools], sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(digest, turns, str(row.get("category") or ""), tools)


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A list, or JSON text of one; Nemotron's sets keep it inside `metadata`."""
    found = row.get("tools")
    if not found and row.get("metadata"):
        metadata = row["metadata"]
        found = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("tools")
    return tuple(json.loads(found) if isinstance(found, str) else found or ())


def _turns(row: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The user's side of a conversation, cut into what precedes each answer."""
    if isinstance(row.get("prompt"), str):
        yield [{"role": "user", "content": row["prompt"]}]
        return
    if "turns" in row:
        yield from ([{"role": "user", "content": turn}] for turn in row["turns"])
        return
    pending: list[dict[str, Any]] = []
    for message in map(_message, row.get("messages") or row["conversations"]):
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


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's keys, whichever of the two namings it has."""
    role = ROLES[message.get("role") or message["from"]]
    content = message["content"] if "content" in message else message["value"]
    kept = {key: message[key] for key in MESSAGE_KEYS if message.get(key)}
    return {"role": role, "content": content or "", **kept}


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


def read_rows(source: str, split: str | None = None) -> Rows:
    """Every row of a file, a directory (its files in the order of their names) or a hub data set `org/name[:config]`.

    `split` names the hub data set's split. Raises UsageError for what can not be read.
    """
    path = Path(source)
    if from_hub(source):
        yield from hub_rows(source, split)
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise UsageError(f"TS-PROMPTS-EMPTY {path} holds none of {', '.join(SUFFIXES)}", REMEDY)
        for file in files:
            yield from _file_rows(file)
    else:
        yield from _file_rows(path)


def from_hub(source: str) -> bool:
    """Whether `source` names a hub data set: not a path that exists, and written like an id."""
    return not Path(source).exists() and HUB_ID.fullmatch(source.partition(":")[0]) is not None


def _file_rows(path: Path) -> Rows:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}", REMEDY) from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        for number, row in enumerate(_json(text, str(path)), 1):
            yield f"{path}:{number}", row
        return
    plain = path.suffix not in (".jsonl", ".json")
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, {"prompt": line} if plain else _json(line, where)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TrtspecError(f"TS-PROMPTS-ROW {where}: not JSON ({error})", REMEDY) from None


def _parquet_rows(path: Path) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingDependency(f"reading {path} needs pyarrow", EXTRA) from None
    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}", "pass a parquet file") from None


def hub_rows(name: str, split: str | None) -> Rows:
    """Streams `org/name[:config]` (or a local data set directory) with the datasets library. A row without a category
    takes the split's name."""
    try:
        import datasets
    except ImportError:
        raise MissingDependency(f"reading the hub data set {name} needs datasets", EXTRA) from None
    identifier, _, config = name.partition(":")
    wanted = split or "train"
    try:
        stream = datasets.load_dataset(identifier, config or None, split=wanted, streaming=True)
        for number, row in enumerate(stream, 1):
            yield f"{name}[{wanted}]:{number}", {"category": wanted if split else "", **row}
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"cannot read split {wanted!r} of the hub data set {name}: {error}",
            "check --split, `hf auth login` for gated data, or download it and pass the directory",
        ) from None
