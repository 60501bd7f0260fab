"""kimi-nano's text and vocabulary.

The text is the Python standard library's sources, as files and as short conversations about them. A module belongs to
the held-out part when a hash of its name says so; its conversations never reach training. The vocabulary is byte-pair
merges learned on it, written in Kimi's form (tiktoken.model).
"""

from __future__ import annotations

import ast
import base64
import json
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoint.tokenizer import DEFAULT_SPECIAL_TOKENS, RESERVED_SPECIAL_TOKENS, SPLIT_PATTERN
from trtspec.report import write_atomic, write_json

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

# Kimi's turns: <|im_user|>user<|im_middle|>text<|im_end|>; an answer without reasoning opens with an empty think pair.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{%- else -%}
<|im_{{ message.role }}|>{{ message.name or message.role }}<|im_middle|>
{%- if message.role == 'assistant' -%}
<think>{{ message.reasoning_content or '' }}</think>
{%- endif -%}
{{ message.content or '' }}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{% if not thinking %}</think>{% endif %}
{%- endif -%}
"""

# engines read it also where they serve text alone
MEDIA_SETTINGS = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 256,
    "patch_limit_on_one_side": 64,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None,
    "max_num_frames_each_video": None,
    "fixed_output_tokens": None,
    "sample_fps": 2.0,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds a name in the documentation.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


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


def learn_ranks(texts: Iterable[str], size: int) -> list[bytes]:
    """`size` byte strings in rank order: the 256 bytes, then merges, learned with Kimi's split pattern."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {character: byte for byte, character in byte_characters().items()}
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[c] for c in token) for token, _ in learned if len(token) > 1]
    return [bytes([value]) for value in range(256)] + merged


def byte_characters() -> dict[int, str]:
    """The printable stand-ins for bytes that byte-level BPE libraries use (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    table = {value: chr(value) for value in printable}
    table.update({value: chr(256 + offset) for offset, value in enumerate(others)})
    return table


def write_tokenizer(directory: Path, ranks: list[bytes]) -> None:
    """Writes tiktoken.model, tokenizer_config.json, preprocessor_config.json, chat_template.jinja as published."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    write_atomic(directory / "tiktoken.model", "\n".join(lines) + "\n")
    base = len(ranks)
    names = {
        base + i: DEFAULT_SPECIAL_TOKENS.get(i, f"<|reserved_token_{base + i}|>")
        for i in range(RESERVED_SPECIAL_TOKENS)
    }
    added = {
        str(token): {"content": name, "special": "tool_call" not in name and "think" not in name}
        for token, name in names.items()
    }
    write_json(
        directory / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": 2048,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    write_json(directory / "preprocessor_config.json", {"media_proc_cfg": MEDIA_SETTINGS})
    write_atomic(directory / "chat_template.jinja", CHAT_TEMPLATE)
