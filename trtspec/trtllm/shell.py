"""Shell scripts as statements: the words of each command and array with their lines.

An expansion (`$NAME`, `${NAME%, }`, `$(command)`) needs a running shell and stays in its word as
written. `masked` hides it from a YAML parser, character by character, and `unmasked` undoes that.
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
REDIRECTED = ">"  # the word in place of any redirection
QUOTED_TEXT = re.compile(QUOTED, re.DOTALL)
ESCAPED = re.compile(r"\\([$`\"\\\n])")
HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(?P<quote>['\"\\]?)(?P<end>[A-Za-z_][\w.-]*)['\"]?(?P<behind>[^\n]*\n)"
    r"(?P<body>.*?)^[ \t]*(?P=end)['\"]?[ \t\r]*$",
    re.MULTILINE | re.DOTALL,
)
INTO = re.compile(r"(?:(?<![2&])>>?|\btee(?: -a)?)\s*[\"']?([^\s\"'|;&<>()]+)")
# Each ASCII character of an expansion, and the private-use character that hides it from YAML.
HIDDEN = {code: 0xE000 + code for code in range(128) if code != ord("\n")}
SHOWN = {hidden: code for code, hidden in HIDDEN.items()}
MASK = "[\ue000-\ue07f]"
OMITTED = "#\ue0ff"  # begins a line that is only an expansion, so that YAML reads a comment


@dataclass(frozen=True)
class ShellWord:
    """A word of a script, without its quotation marks.

    Args:
        line: number of the word's line in the file, from 0.
    """

    text: str
    line: int


def statements(text: str, line_of: Callable[[int], int]) -> list[list[ShellWord]]:
    """Splits a script into statements: the words of each command, then of each array.

    A redirection is the word REDIRECTED. `line_of`: returns the line of the file for a line of the
    script, both from 0.
    """
    words: list[ShellWord] = []
    commands = [words]
    arrays: dict[str, list[ShellWord]] = {}
    in_array = False
    line = 0
    for token in TOKEN.finditer(text):
        if token["array"]:
            words = arrays.setdefault(token["name"], [])
            in_array = True
        elif token["word"]:
            unquoted = QUOTED_TEXT.sub(_without_quotes, token[0])
            words.append(ShellWord(unquoted, line_of(line)))
        elif token["redirect"]:
            words.append(ShellWord(REDIRECTED, line_of(line)))
        # a separator ends a command, but in an array only the closing bracket ends it
        elif not token["blank"] and (token[0] == ")" or not in_array):
            words = []
            in_array = False
            commands.append(words)
        line += token[0].count("\n")
    return [*commands, *arrays.values()]


def _without_quotes(quoted: re.Match[str]) -> str:
    """Text of a quoted string or of an escaped character, as the shell reads it."""
    single = quoted["single"]
    double = ESCAPED.sub(r"\1", quoted["double"] or "")
    return single or double or quoted["escaped"] or ""


def masked(text: str) -> str:
    """Hides each shell or template expansion of a text from a YAML parser.

    Each character is replaced by one private-use character, so that positions stay the same. A line
    that is only an expansion becomes a comment.
    """
    hidden = re.sub(f"{TEMPLATE}|{EXPANSION}", lambda match: match[0].translate(HIDDEN), text)
    own_line = rf"(?m)^([ \t]*)(?={MASK}+[ \t\r]*$)"
    return re.sub(own_line, rf"\1{OMITTED}", hidden)


def unmasked(text: str) -> str:
    """Returns a masked text with its expansions as they were written."""
    return text.replace(OMITTED, "").translate(SHOWN)
