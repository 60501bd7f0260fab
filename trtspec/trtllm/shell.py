"""Shell scripts as statements: the words of each command and array with their lines, and here-documents.

What only a running shell knows (`$NAME`, `${NAME%, }`, `$(command)`) stays in a word as it is written. `masked` hides
it from a YAML parser, character by character, and `unmasked` undoes that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

EXPANSION = (
    r"\$\{(?:[^{}\n]|\{[^{}\n]*\})*\}|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    r"|`[^`\n]*`|\$[\w@*#?$!-]+|\$"
)
TEMPLATE = r"\{\{[^\n]*?\}\}|\{%[^\n]*?%\}|(?<=['\"])\{\w+\}(?=['\"])"  # of Helm, Jinja and sweeps
QUOTED = r"\$?'(?P<single>[^']*)'|\"(?P<double>(?:[^\"\\]|\\.)*)\"|\\(?P<escaped>[^\n])"
TOKEN = re.compile(
    rf"""
      (?P<blank>[ \t\r]+|\\\r?\n|\#[^\n]*)
    | (?P<array>(?P<name>\w+)\+?=\()
    | (?P<redirect>(?:\d|&)?[<>]+[|&]?(?:\d\b|-)?)
    | (?P<word>(?:{QUOTED}|{TEMPLATE}|{EXPANSION}|[^\s\\'"$`;&|<>()])+)
    | (?P<stop>.)
    """,
    re.VERBOSE | re.DOTALL,
)
REDIRECTED = ">"
PIECE = re.compile(QUOTED, re.DOTALL)
ESCAPED = re.compile(r"\\([$`\"\\\n])")
HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(?P<quote>['\"\\]?)(?P<end>[A-Za-z_][\w.-]*)['\"]?(?P<behind>[^\n]*\n)"
    r"(?P<body>.*?)^[ \t]*(?P=end)['\"]?[ \t\r]*$",
    re.MULTILINE | re.DOTALL,
)
INTO = re.compile(r"(?:(?<![2&])>>?|\btee(?: -a)?)\s*[\"']?([^\s\"'|;&<>()]+)")
HIDDEN = {code: 0xE000 + code for code in range(128) if code != ord("\n")}
SHOWN = {hidden: code for code, hidden in HIDDEN.items()}
MASK = "[\ue000-\ue07f]"
OMITTED = "#\ue0ff"  # before a line that is nothing but an expansion


@dataclass(frozen=True)
class ShellWord:
    """`text`: without its quotation marks. `line`: of the file, from 0."""

    text: str
    line: int


def statements(text: str, line_of: Callable[[int], int]) -> list[list[ShellWord]]:
    """The words of each command, then of each array. A redirection is the word REDIRECTED. `line_of`: the line of the
    file for one of the script."""
    words = list[ShellWord]()
    commands, arrays, inside, line = [words], dict[str, list[ShellWord]](), False, 0
    for token in TOKEN.finditer(text):
        if token["array"]:
            words, inside = arrays.setdefault(token["name"], []), True
        elif token["word"]:
            words.append(ShellWord(_unquoted(token[0]), line_of(line)))
        elif token["redirect"]:
            words.append(ShellWord(REDIRECTED, line_of(line)))
        elif not token["blank"] and (token[0] == ")" or not inside):
            words, inside = [], False
            commands.append(words)
        line += token[0].count("\n")
    return [*commands, *arrays.values()]


def _unquoted(word: str) -> str:
    def inner(piece: re.Match[str]) -> str:
        double = ESCAPED.sub(r"\1", piece["double"] or "")
        return piece["single"] or double or piece["escaped"] or ""

    return PIECE.sub(inner, word)


def masked(text: str) -> str:
    """The text with each expansion as a plain scalar of the same length; a line of its own becomes a comment."""
    hidden = re.sub(f"{TEMPLATE}|{EXPANSION}", lambda match: match[0].translate(HIDDEN), text)
    return re.sub(rf"(?m)^([ \t]*)(?={MASK}+[ \t\r]*$)", rf"\1{OMITTED}", hidden)


def unmasked(text: str) -> str:
    return text.replace(OMITTED, "").translate(SHOWN)
