"""Checks that tokenizer, chat template and config.json mean the same tokens.

`target_problems` asks it for every command that works on a target, and `check` for the tokenizer
that it reads answers with.
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
LAST_TOKEN = "[PAD]"  # of the vocabulary
CONFIG_TOKENS = {
    "bos_token_id": ("[BOS]",),
    "eos_token_id": ("[EOS]", END_OF_TURN),
    "pad_token_id": (LAST_TOKEN,),
    "media_placeholder_token_id": ("<|media_pad|>",),
}
FETCH = "copy {} from the base model's repository"
FIRST = {"role": "system", "content": "S1"}
USER = {"role": "user", "content": "Q1"}
ANSWER = {"role": "assistant", "content": "A1", "reasoning_content": "R"}
CALL_ID = call_id("f1", 0)
CALL = {"id": CALL_ID, "function": {"name": "f1", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": "C1", "reasoning_content": "R1", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "T1"}
TOOL = {"type": "function", "function": {"name": "f1", "description": "D1", "parameters": {}}}
ASSISTANT = r"<\|im_assistant\|>[^<]*<\|im_middle\|>"
SYSTEM = r"<\|im_system\|>[^<]*<\|im_middle\|>"
QUESTION = r"<\|im_user\|>[^<]*<\|im_middle\|>Q1<\|im_end\|>"
MARKS = "does not put {} between the family's marks, of which each is one token"
# Severity, pattern that the family's templates write of the conversation above, and the fault of
# a template that does not.
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
    """Returns an error for each file whose tokens are not the model's.

    Also returns a problem if the template does not write what the family's templates write.
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
    """Ids of the family's special tokens by name: the vocabulary's last ids, as in kimi-nano."""
    names = dict(_declared(read_optional(DATA / "kimi-nano" / CONFIG)))
    shift = vocab_size - 1 - names[LAST_TOKEN]
    return {name: token + shift for name, token in names.items() if "reserved" not in name}


def _declared(tokenizer: dict[str, Any]) -> list[tuple[str, int]]:
    """Name and id of each special token of a tokenizer_config.json."""
    declared = tokenizer.get("added_tokens_decoder") or {}
    return [(entry["content"], int(token)) for token, entry in declared.items()]


def _problem(file: str, message: str) -> Problem:
    return Problem(TOKENIZER, "error", file, message, FETCH.format(file))


def _ranks(directory: Path, vocab_size: int) -> Iterator[Problem]:
    """Compares the number of tokens with the vocabulary."""
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
    """Errors for files that give a token of the family another id or name, or omit turn marks."""
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
            renamed = token in names and model_name != name and "reserved" not in name
            if renamed or ids.get(name, token) != token:
                wrong.append(f"{name} is token {token}, which is {model_name} in the model")
        if wrong:
            problems.append(_problem(file, f"{wrong[0]} ({len(wrong)} tokens in all)"))
    present: set[str] = set()
    for tokens in named.values():
        present.update(name for name, _ in tokens)
    marks = [name for name in ids if name.startswith("<|im_") and name not in present]
    if marks and any(named.values()) and not problems:
        problems.append(_problem(CONFIG, f"{', '.join(marks)} is not named"))
    return problems


def _configured(
    path: Path, config: dict[str, Any], tokenizer: dict[str, Any], ids: dict[str, int]
) -> Iterator[Problem]:
    """Errors for ids of config.json and generation_config.json, and for the end of a text.

    An id is wrong if it is another token than the family's.
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
    """A problem of the template on a conversation that shows the family's marks."""
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
            checks.pop()  # some leave out the reasoning then
        for severity, pattern, message in checks:
            if not re.search(pattern, text, re.DOTALL):
                where = Path(template.where).name
                yield Problem(code, severity, where, message, FETCH.format(TEMPLATE))
                return


def require_tokenizer(path: Path) -> None:
    """Raises TrtspecError with the first error of a tokenizer.

    Does nothing if config.json beside it does not give the vocabulary.
    """
    config = read_optional(path / "config.json")
    text = config.get("text_config") or config
    if not isinstance(text.get("vocab_size"), int):
        return
    for problem in errors_in(tokenizer_problems(path, config, text["vocab_size"])):
        raise TrtspecError(f"{problem.where}: {problem.message}", problem.remedy, problem.code)
