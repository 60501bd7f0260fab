"""Checks that tokenizer, chat template and config.json mean the same tokens.

`target_problems` includes these checks for every command that works on a target. `check` uses them
for the tokenizer with which it reads answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtspec.checkpoint.chat_parser import END_OF_TURN, THINK, call_id, reply_text
from trtspec.checkpoint.target_tensors import finding
from trtspec.checkpoint.tokenizer import (
    RESERVED_SPECIAL_TOKENS,
    ChatTemplate,
    read_optional,
    read_ranks,
)
from trtspec.data_files import DATA
from trtspec.errors import Problem, Severity, TrtspecError, errors_in

TOKENIZER = "TS-TARGET-TOKENIZER"
IDS = "TS-TARGET-TOKEN-IDS"
CONFIG = "tokenizer_config.json"
FAST = "tokenizer.json"
ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
LAST_TOKEN = "[PAD]"  # token with the last id of the vocabulary
# names of the tokens that each key of a config may mean
CONFIG_TOKENS = {
    "bos_token_id": ("[BOS]",),
    "eos_token_id": ("[EOS]", END_OF_TURN),
    "pad_token_id": (LAST_TOKEN,),
    "media_placeholder_token_id": ("<|media_pad|>",),
}
FETCH = "copy {} from the base model's repository"
# messages, with tool and tool call, that are rendered to see what a template writes
FIRST = {"role": "system", "content": "S1"}
USER = {"role": "user", "content": "Q1"}
ANSWER = {"role": "assistant", "content": "A1", "reasoning_content": "R"}
CALL_ID = call_id("f1", 0)
CALL = {"id": CALL_ID, "function": {"name": "f1", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": "C1", "reasoning_content": "R1", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "T1"}
TOOL = {"type": "function", "function": {"name": "f1", "description": "D1", "parameters": {}}}
# patterns of the beginnings of turns, and of a whole turn of the user
ASSISTANT = r"<\|im_assistant\|>[^<]*<\|im_middle\|>"
SYSTEM = r"<\|im_system\|>[^<]*<\|im_middle\|>"
QUESTION = r"<\|im_user\|>[^<]*<\|im_middle\|>Q1<\|im_end\|>"
MARKS = "does not put {} between the family's marks, each of which is one token"
# For each property of the family's templates: the severity if it is absent, the pattern that the
# rendered conversation must contain, and the fault of a template without it.
WRITTEN: tuple[tuple[Severity, str, str], ...] = (
    ("error", SYSTEM + r"S1<\|im_end\|>.*" + QUESTION + ASSISTANT, MARKS.format("turns")),
    ("error", ASSISTANT + r"(<think>R?</think>)?A1<\|im_end\|>", MARKS.format("answers")),
    ("error", ASSISTANT + r"(<think>(</think>)?)?\s*$", "does not open the turn of the answer"),
    ("warning", SYSTEM + r"[^<]*D1[^<]*<\|im_end\|>", "leaves out the tools of a request"),
    (
        "warning",
        SYSTEM + rf"## Return of {CALL_ID}\s*T1<\|im_end\|>",
        "leaves out tool calls or their results",
    ),
)


def tokenizer_problems(path: Path, config: dict[str, Any], vocab_size: int) -> list[Problem]:
    """Returns the problems of a checkpoint's tokenizer and chat template.

    A file that gives tokens other ids or names than the model is an error, and so is a template
    that does not write the family's turns.

    Args:
        path: directory of the checkpoint.
        config: contents of config.json.
        vocab_size: number of tokens of the model.
    """
    problems: list[Problem] = []
    try:
        tokenizer = read_optional(path / CONFIG)
        ids = family_tokens(vocab_size)
        problems += _ranks(path, vocab_size)
        problems += _named(path, tokenizer, ids)
        problems += _configured(path, config, tokenizer, ids)
        problems += _template(path, tokenizer)
    except TrtspecError as error:
        where = error.message.partition(": ")[0].removeprefix(f"{path}/")
        problems.append(Problem(TOKENIZER, "error", where, error.message, error.remedy))
    return problems


def family_tokens(vocab_size: int) -> dict[str, int]:
    """Returns the ids of the family's special tokens by name, without reserved ones.

    They are the last ids of the vocabulary, in the same order as in kimi-nano.
    """
    names = dict(_declared(read_optional(DATA / "kimi-nano" / CONFIG)))
    shift = vocab_size - 1 - names[LAST_TOKEN]
    return {name: token + shift for name, token in names.items() if "reserved" not in name}


def _declared(tokenizer: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns name and id of each special token in a tokenizer_config.json."""
    declared = tokenizer.get("added_tokens_decoder") or {}
    return [(entry["content"], int(token)) for token, entry in declared.items()]


def _problem(file: str, message: str) -> Problem:
    """Returns an error of a tokenizer file. Its remedy is to copy the base model's file."""
    return Problem(TOKENIZER, "error", file, message, FETCH.format(file))


def _ranks(directory: Path, vocab_size: int) -> Iterator[Problem]:
    """Yields a problem if the number of tokens is not the model's, or if no tokenizer exists."""
    path = directory / "tiktoken.model"
    if path.is_file():
        count = len(read_ranks(path)) + RESERVED_SPECIAL_TOKENS
        if count != vocab_size:
            reserved = f"its ranks and {RESERVED_SPECIAL_TOKENS} reserved tokens"
            message = f"{reserved} are {count:,}, and the model has {vocab_size:,}"
            yield _problem(path.name, message)
    elif not (directory / FAST).is_file():
        yield finding(TOKENIZER, path.name, "warning")


def _named(path: Path, tokenizer: dict[str, Any], ids: dict[str, int]) -> list[Problem]:
    """Returns errors of files that give a special token another id or name than the family.

    Also returns an error if the marks of turns are missing.
    """
    try:
        added = read_optional(path / FAST).get("added_tokens") or ()
        named = {
            CONFIG: _declared(tokenizer),
            FAST: [(entry["content"], int(entry["id"])) for entry in added],
            ADDED: list(read_optional(path / ADDED).items()),
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return [_problem(CONFIG, "names special tokens in an unknown form")]
    problems = []
    names = {token: name for name, token in ids.items()}
    for file, tokens in named.items():
        wrong = []
        for name, token in tokens:
            model_name = names.get(token, "reserved")
            # A placeholder of a reserved token may have any of the family's ids.
            renamed = token in names and model_name != name and "reserved" not in name
            moved = ids.get(name, token) != token
            if renamed or moved:
                wrong.append(f"{name} is token {token}, which is {model_name} in the model")
        if wrong:
            problems.append(_problem(file, f"{wrong[0]} ({len(wrong)} tokens in all)"))
    present: set[str] = set()
    for tokens in named.values():
        present.update(name for name, _ in tokens)
    missing_marks = [name for name in ids if name.startswith("<|im_") and name not in present]
    if missing_marks and any(named.values()) and not problems:
        problems.append(_problem(CONFIG, f"{', '.join(missing_marks)} is not named"))
    return problems


def _configured(
    path: Path, config: dict[str, Any], tokenizer: dict[str, Any], ids: dict[str, int]
) -> Iterator[Problem]:
    """Yields errors of token ids in config.json and generation_config.json, and of eos_token.

    An id is wrong if it is not the id of the token that the key means in the family.
    """
    generation = "generation_config.json"
    files = [("config.json", config), ("config.json", config.get("text_config") or {})]
    files.append((generation, read_optional(path / generation)))
    for file, values in files:
        for key, names in CONFIG_TOKENS.items():
            stated = values.get(key)
            listed = stated if isinstance(stated, list) else [stated]
            expected = (None, *map(ids.get, names))
            other = [number for number in listed if number not in expected]
            if other:
                token_names = " or ".join(names)
                message = f"{key} is {other[0]}, and {token_names} is {ids[names[0]]}"
                yield Problem(IDS, "error", f"{file}: {key}", message)
    end = tokenizer.get("eos_token")
    if isinstance(end, str) and end not in CONFIG_TOKENS["eos_token_id"]:
        yield Problem(IDS, "error", f"{CONFIG}: eos_token", f"eos_token is {end}")
    if not any(values.get("eos_token_id") for _, values in files):
        message = "eos_token_id is absent: answers end only at their limit"
        yield Problem(IDS, "warning", "config.json: eos_token_id", message)


def _template(path: Path, tokenizer: dict[str, Any]) -> Iterator[Problem]:
    """Yields at most one problem of the chat template.

    The template renders a conversation that has every type of message.
    """
    code = "TS-TARGET-TEMPLATE"
    if not tokenizer.get("chat_template") and not (path / TEMPLATE).is_file():
        yield finding(code, TEMPLATE, "warning")
        return
    template = ChatTemplate.from_directory(path, tokenizer)
    conversation: list[dict[str, Any]] = [FIRST, USER, ANSWER, USER, CALLING, RESULT]
    reply = reply_text(CALLING, False, THINK in template.source) + END_OF_TURN
    form = "writes reasoning or calls in another form than the family"
    for thinking in (None, True, False):
        text = template.render(conversation, [TOOL], thinking=thinking)
        checks = [*WRITTEN, ("warning", re.escape(reply), form)]
        if thinking is False:
            checks.pop()  # Some templates then leave out the reasoning of the call.
        for severity, pattern, message in checks:
            if not re.search(pattern, text, re.DOTALL):
                where = Path(template.where).name
                yield Problem(code, severity, where, message, FETCH.format(TEMPLATE))
                return


def require_tokenizer(path: Path) -> None:
    """Raises TrtspecError with the first error of the tokenizer in a directory.

    Does nothing if config.json in the directory does not state a vocabulary size.
    """
    config = read_optional(path / "config.json")
    text = config.get("text_config") or config
    if not isinstance(text.get("vocab_size"), int):
        return
    for problem in errors_in(tokenizer_problems(path, config, text["vocab_size"])):
        raise TrtspecError(f"{problem.where}: {problem.message}", problem.remedy, problem.code)
