"""kimi-nano's text: the Python standard library's sources, as files and as short conversations about them.

A module belongs to the held-out part when a hash of its name says so; its conversations never reach training.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELDOUT_SHARE = 12  # one module in twelve
MAX_FILE_BYTES = 200_000
MAX_ANSWER_CHARS = 700
SKIPPED = (
    "site-packages",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "test/cjkencodings",
    "idlelib/idle_test",
    "__pycache__",
)
CATEGORIES = ("completion", "docstring", "continuation", "test", "module")


@dataclass(frozen=True)
class Exchange:
    """One exchange; `tools` is set for the tool-call examples, whose answer is the call's JSON arguments."""

    id: str
    category: str
    question: str
    answer: str
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Module:
    name: str
    text: str
    heldout: bool


def modules() -> list[Module]:
    """The standard library's modules with their source, in name order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in SKIPPED) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if not text.isascii() or len(text) < 400:
            continue
        found.append(Module(name, text, zlib.crc32(name.encode()) % HELDOUT_SHARE == 0))
    return found


def conversations(module: Module) -> Iterator[Exchange]:
    """Questions and answers cut out of one module: complete, document, continue, test, describe."""
    try:
        tree = ast.parse(module.text)
    except SyntaxError:
        return
    lines = module.text.splitlines()
    name = module.name
    docstring = ast.get_docstring(tree)
    if docstring and len(docstring) > 60:
        yield Exchange(f"module:{name}", "module", f"What is `{name}` for?", clip(docstring))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and 4 <= node.end_lineno - node.lineno <= 40:
            yield from function_conversations(name, node, lines)
    for begin in range(20, len(lines) - 30, 60):
        shown, rest = "\n".join(lines[begin - 12 : begin]), "\n".join(lines[begin : begin + 20])
        if len(shown) > 150 and len(rest) > 150:
            yield Exchange(
                f"continuation:{name}:{begin}",
                "continuation",
                f"Continue this code:\n```python\n{shown}\n```",
                fenced(rest),
            )


def function_conversations(name: str, node: ast.FunctionDef, lines: list[str]) -> Iterator[Exchange]:
    """Conversations about one function: write its body, its docstring, or, for a test method, the test."""
    assert node.end_lineno is not None
    source = dedent(lines[node.lineno - 1 : node.end_lineno])
    key = f"{name}:{node.name}:{node.lineno}"
    if node.name.startswith("test_"):
        question = f"Write the test `{node.name}` of `{name}`."
        yield Exchange(f"test:{key}", "test", question, fenced(source))
        return
    docstring = ast.get_docstring(node)
    first = node.body[0]
    if not docstring or len(node.body) < 2 or first.end_lineno is None:
        return
    head = dedent(lines[node.lineno - 1 : first.end_lineno])
    body = "\n".join(lines[first.end_lineno : node.end_lineno])
    without = dedent(lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno])
    yield Exchange(
        f"completion:{key}", "completion", f"Complete this function:\n```python\n{clip(head)}\n```", fenced(body)
    )
    if len(docstring) > 40:
        question = f"Write the docstring of this function:\n```python\n{clip(without)}\n```"
        yield Exchange(f"docstring:{key}", "docstring", question, clip(docstring))


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds a name in the documentation.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


def tool_conversations(module: Module) -> Iterator[Exchange]:
    """Requests that are answered by a call of `lookup` with the name that the user gave."""
    try:
        tree = ast.parse(module.text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(node.name) > 3:
            yield Exchange(
                f"tool:{module.name}:{node.name}:{node.lineno}",
                "tool",
                f"Look up `{node.name}` in the documentation.",
                json.dumps({"name": node.name}),
                (LOOKUP,),
            )


def dedent(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def fenced(code: str) -> str:
    return f"```python\n{clip(code)}\n```"


def clip(text: str) -> str:
    """At most MAX_ANSWER_CHARS characters, cut at a line end."""
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    return text[: text.rfind("\n", 0, MAX_ANSWER_CHARS) if "\n" in text[:MAX_ANSWER_CHARS] else MAX_ANSWER_CHARS]


def messages(conversation: Exchange) -> list[dict[str, Any]]:
    """The conversation as OpenAI messages, answer included."""
    answer: dict[str, Any] = {"role": "assistant", "content": conversation.answer}
    if conversation.tools:
        call = {"name": "lookup", "arguments": conversation.answer}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "functions.lookup:0", "type": "function", "function": call}],
        }
    return [{"role": "user", "content": conversation.question}, answer]


def sample(items: list[Exchange], count: int, seed: int) -> list[Exchange]:
    """About `count` conversations, the same number from each category as far as there are enough, in a fixed order."""
    rng = random.Random(seed)
    by_category: dict[str, list[Exchange]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    share = max(1, count // len(by_category))
    chosen = [item for part in by_category.values() for item in rng.sample(part, min(share, len(part)))]
    rng.shuffle(chosen)
    return chosen
