"""Whether tokenizer, chat template and config.json mean the same tokens. `target_problems` asks it for every command
that works on a target, and `check` for the tokenizer that it reads answers with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtspec.checkpoint.chat_parser import THINK, call_id, reply_pieces
from trtspec.checkpoint.headers import POINTER
from trtspec.checkpoint.target_tensors import finding
from trtspec.checkpoint.tokenizer import (
    RESERVED_SPECIAL_TOKENS,
    ChatTemplate,
    read_optional,
    read_ranks,
)
from trtspec.errors import Problem, Severity, TrtspecError
from trtspec.files import open_regular

TOKENIZER = "TS-TARGET-TOKENIZER"
CONFIG, FAST, ADDED = "tokenizer_config.json", "tokenizer.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"
# offset among the reserved tokens -> name, in every published tokenizer of K2 to K2.7
FAMILY_TOKENS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>", 21: "<|media_pad|>",
    22: "<think>", 23: "</think>", 255: "[PAD]",
}  # fmt: skip
TURNS = [FAMILY_TOKENS[offset] for offset in (2, 3, 4, 10, 17)]
CONFIG_TOKENS = {
    "bos_token_id": ("[BOS]",),
    "eos_token_id": ("[EOS]", "<|im_end|>"),
    "media_placeholder_token_id": ("<|media_pad|>",),
}
FETCH = "copy {} from the base model's repository"
USER = {"role": "user", "content": "Q1"}
CALL_ID = call_id("f1", 0)
CALL = {"id": CALL_ID, "function": {"name": "f1", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": "C1", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "T1"}
TOOL = {"type": "function", "function": {"name": "f1", "parameters": {}}}
ASKED = re.compile(
    r"<\|im_user\|>[^<]*<\|im_middle\|>Q1<\|im_end\|><\|im_assistant\|>[^<]*<\|im_middle\|>(<think>(</think>)?)?\s*$"
)
ANSWERED = re.compile(r"<\|im_assistant\|>[^<]*<\|im_middle\|>(<think>R?</think>)?A1<\|im_end\|>")


def tokenizer_problems(path: Path, config: dict[str, Any], vocab_size: int) -> list[Problem]:
    """Returns an error for each file whose tokens are not the model's, and what the template does in another way than
    the family's."""
    base = vocab_size - RESERVED_SPECIAL_TOKENS
    ids = {name: base + offset for offset, name in FAMILY_TOKENS.items()}
    problems: list[Problem] = []
    try:
        tokenizer = read_optional(path / CONFIG)
        problems += _ranks(path, vocab_size)
        problems += _named(path, tokenizer, ids)
        problems += _configured(path, config, ids)
        problems += _template(path, tokenizer)
    except TrtspecError as error:
        where = error.message.partition(": ")[0].removeprefix(f"{path}/")
        problems.append(Problem(TOKENIZER, "error", where, error.message, error.remedy))
    return problems


def _problem(file: str, message: str) -> Problem:
    return Problem(TOKENIZER, "error", file, message, FETCH.format(file))


def _ranks(directory: Path, vocab_size: int) -> Iterator[Problem]:
    path = directory / "tiktoken.model"
    if not path.is_file():
        if not (directory / FAST).is_file():
            yield finding(TOKENIZER, path.name, "warning")
        return
    with open_regular(path) as stream:
        pointer = stream.read(len(POINTER)) == POINTER
    if pointer:
        message = f"{path.name} is a Git LFS pointer, not the vocabulary"
        yield Problem(TOKENIZER, "warning", path.name, message, "run `git lfs pull` there")
        return
    count = len(read_ranks(path)) + RESERVED_SPECIAL_TOKENS
    if count != vocab_size:
        reserved = f"its ranks and {RESERVED_SPECIAL_TOKENS} reserved tokens"
        yield _problem(path.name, f"{reserved} are {count:,}, and the model has {vocab_size:,}")


def _template(path: Path, tokenizer: dict[str, Any]) -> Iterator[Problem]:
    if not tokenizer.get("chat_template") and not (path / TEMPLATE).is_file():
        yield finding("TS-TARGET-TEMPLATE", TEMPLATE, "warning")
        return
    template = ChatTemplate.from_directory(path, tokenizer)
    for severity, message in _behaviour(template):
        where = Path(template.where).name
        yield Problem("TS-TARGET-TEMPLATE", severity, where, message, FETCH.format(TEMPLATE))


def _named(path: Path, tokenizer: dict[str, Any], ids: dict[str, int]) -> Iterator[Problem]:
    """Each file that gives a token of the family another id, and turn marks that none names."""
    try:
        named = {
            CONFIG: {
                entry["content"]: int(token)
                for token, entry in (tokenizer.get("added_tokens_decoder") or {}).items()
            },
            FAST: {
                entry["content"]: entry["id"]
                for entry in read_optional(path / FAST).get("added_tokens") or ()
            },
            ADDED: read_optional(path / ADDED),
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        yield _problem(CONFIG, "names special tokens in an unknown form")
        return
    for file, tokens in named.items():
        names = {token: name for name, token in tokens.items()}
        wrong = []
        for name, token in ids.items():
            other = names.get(token, name)
            if tokens.get(name, token) != token:
                wrong.append(f"{name} is token {tokens[name]}, and {token} in the model")
            elif other != name and "reserved" not in other:
                wrong.append(f"{token} is {other}, and {name} in the model")
        if wrong:
            count = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            message = f"{wrong[0]}{count}"
            yield _problem(file, message)
    absent = [name for name in TURNS if not any(name in tokens for tokens in named.values())]
    if absent and any(named.values()):
        yield _problem(CONFIG, f"{', '.join(absent)} is not named")


def _configured(path: Path, config: dict[str, Any], ids: dict[str, int]) -> Iterator[Problem]:
    """Ids of config.json and generation_config.json that are other tokens than the family's."""
    text = config.get("text_config")
    places = [("config.json", config), ("config.json", text if isinstance(text, dict) else {})]
    places.append(("generation_config.json", read_optional(path / "generation_config.json")))
    for file, values in places:
        for key, names in CONFIG_TOKENS.items():
            stated = values.get(key)
            listed = stated if isinstance(stated, list) else [stated]
            other = [number for number in listed if number not in (None, *map(ids.get, names))]
            if other:
                message = f"{key} is {other[0]}, and {' or '.join(names)} is {ids[names[0]]}"
                yield Problem("TS-TARGET-TOKEN-IDS", "error", f"{file}: {key}", message)


def _behaviour(template: ChatTemplate) -> Iterator[tuple[Severity, str]]:
    """What a template does in another way than the family's, on conversations that show it."""
    marks = "does not put turns between the family's marks, of which each is one token"
    if not ASKED.search(template.render([USER], thinking=None)):
        yield "error", marks
        return
    answer = {"role": "assistant", "content": "A1", "reasoning_content": "R"}
    if not ANSWERED.search(template.render([USER, answer, USER], thinking=None)):
        yield "error", marks.replace("turns", "answers")
    if "f1" not in template.render([USER], [TOOL], thinking=None):
        yield "warning", "leaves out the tools of a request"
    calling = CALLING | {"reasoning_content": "R1"}
    rendered = template.render([USER, calling, RESULT], [TOOL], thinking=None)
    tags = THINK in template.source
    reply = "".join(reply_pieces(calling, False, tags)) + "<|im_end|>"
    if f"## Return of {CALL_ID}" not in rendered or "T1" not in rendered:
        yield "warning", "leaves out tool calls or their results"
    elif reply not in rendered:
        yield "warning", "writes reasoning or calls in another form than the family"


def require_tokenizer(path: Path) -> None:
    """Raises TrtspecError with the first error of a tokenizer, if config.json beside it gives the vocabulary."""
    config = read_optional(path / "config.json")
    text = config.get("text_config") or config
    if not isinstance(text.get("vocab_size"), int):
        return
    for problem in tokenizer_problems(path, config, text["vocab_size"]):
        if problem.severity == "error":
            raise TrtspecError(f"{problem.where}: {problem.message}", problem.remedy, problem.code)
