"""Shell scripts as statements: words, here-documents and where the output goes, each with its line.

One regular expression cuts a script into tokens. What only a running shell knows (`$NAME`, `${NAME%, }`, `$(command)`)
stays in a word as it is written. `masked` hides it from a YAML parser, character by character, and `unmasked` undoes
that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

EXPANSION = (
    r"\$\{(?:[^{}\n]|\{[^{}\n]*\})*\}|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    r"|`[^`\n]*`|\$[\w@*#?$!-]+|\$"
)
TEMPLATE = r"\{\{[^\n]*?\}\}|\{%[^\n]*?%\}"  # of Helm and Jinja
TOKEN = re.compile(
    rf"""
      (?P<blank>(?:[ \t\r]|\\\r?\n)+)
    | (?P<comment>\#[^\n]*)
    | (?P<heredoc><<-?[ \t]*(?P<quote>['"\\]?)(?P<end>\w[\w.-]*)['"]?)
    | (?P<redirect>(?:\d|&)?>[>|&]?|<<<|<(?!\())
    | (?P<stop>\n|;|&|\|)
    | (?P<open>[<>]?\() | (?P<close>\))
    | (?P<single>\$?'(?:[^'])*')
    | (?P<double>"(?:[^"\\$`]|\\.|{EXPANSION}|`)*")
    | (?P<plain>[^\s\\'"$`;&|<>(){{}}\#]+|{TEMPLATE}|{EXPANSION}|\\.|.)
    """,
    re.VERBOSE | re.DOTALL,
)
ESCAPED = re.compile(r"\\([$`\"\\\n])")
WRITES = (">", ">>", ">|", "1>", "1>>", "&>", "&>>")
HIDDEN = {code: 0xE000 + code for code in range(128) if code != ord("\n")}
SHOWN = {hidden: code for code, hidden in HIDDEN.items()}
MASK = "[\ue000-\ue07f]"
OMITTED = "#\ue0ff"  # before a line that is nothing but an expansion


@dataclass(frozen=True)
class Word:
    """`text`: without its quotation marks. `line`: of the file, from 0."""

    text: str
    line: int


@dataclass(frozen=True)
class Body:
    """A here-document. `first`: the line of the script at which it begins, from 0. `expands`: the shell puts variables
    in."""

    text: str
    first: int
    expands: bool


@dataclass
class Statement:
    """One command or array. `into`: the file that the output goes to. `array`: the name of the array."""

    words: list[Word] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    into: str = ""
    array: str = ""


def statements(text: str, line_of: Callable[[int], int]) -> list[Statement]:
    """Every command and array of a script. `line_of` gives the line of the file for one of the script."""
    return list(_Reader(text, line_of).statements())


class _Reader:
    def __init__(self, text: str, line_of: Callable[[int], int]) -> None:
        self.text, self.line_of = text, line_of
        self.at = self.line = self.begun = 0  # `begun`: the line at which the word begins
        self.pieces: list[str] = []  # of the word that is being read
        self.current = Statement()
        self.heredocs: list[re.Match[str]] = []
        self.redirect = ""
        self.arrays: dict[str, Statement] = {}

    def statements(self) -> Iterator[Statement]:
        while self.at < len(self.text):
            token = TOKEN.match(self.text, self.at)
            assert token is not None  # the last alternative takes any character
            kind, begin = str(token.lastgroup), self.line
            self.at = token.end()
            self.line += token[0].count("\n")
            if kind == "comment" and self.pieces:
                self.at = token.start() + 1
                self._add("#", begin)
            elif kind in ("single", "double", "plain"):
                self._add(_unquoted(token[0], kind), begin)
            elif kind == "open" and self.pieces and self.pieces[-1].endswith("="):
                self._begin_array()
            elif kind == "open" and token[0] != "(":
                self._add(token[0], begin)  # the output of a command in place of a file
            else:
                self._end_word()
                if kind == "heredoc":
                    self.heredocs.append(token)
                elif kind == "redirect":
                    self.redirect = token[0]
                elif kind in ("stop", "open", "close") and not self._goes_on(token[0]):
                    yield from self._finished(token[0] == "\n")
        self._end_word()
        yield from self._finished(True)
        yield from self.arrays.values()

    def _add(self, text: str, line: int) -> None:
        if not self.pieces:
            self.begun = line
        self.pieces.append(text)

    def _begin_array(self) -> None:
        name = "".join(self.pieces).rstrip("+=")
        self.pieces = []
        self.current = self.arrays.setdefault(name, Statement(array=name))

    def _end_word(self) -> None:
        if not self.pieces:
            return
        word = Word("".join(self.pieces), self.line_of(self.begun))
        self.pieces = []
        if self.redirect in WRITES or self._writes():
            self.current.into = word.text
        if not self.redirect:
            self.current.words.append(word)
        self.redirect = ""

    def _writes(self) -> bool:
        names = [word.text for word in self.current.words if word.text != "-a"]
        return names[-1:] == ["tee"]

    def _goes_on(self, token: str) -> bool:
        """Whether a line break, or an operator, is inside an array."""
        return bool(self.current.array) and token != ")"

    def _finished(self, line_ends: bool) -> Iterator[Statement]:
        if line_ends:
            for token in self.heredocs:
                self.current.bodies.append(self._body(token))
            self.heredocs = []
        if self.heredocs:  # `cat <<EOF | tee FILE`: the document follows the line
            return
        if not self.current.array and (self.current.words or self.current.bodies):
            yield self.current
        self.current = Statement()

    def _body(self, token: re.Match[str]) -> Body:
        closing = re.compile(rf"^[ \t]*{re.escape(token['end'])}['\"]?[ \t\r]*$", re.MULTILINE)
        end = closing.search(self.text, self.at)
        stop = end.start() if end else len(self.text)
        body = Body(self.text[self.at : stop], self.line, not token["quote"])
        self.at = min(end.end() + 1, len(self.text)) if end else stop
        self.line += self.text.count("\n", stop - len(body.text), self.at)
        return body


def _unquoted(text: str, kind: str) -> str:
    if kind == "single":
        return text.removeprefix("$")[1:-1]
    if kind == "double":
        return ESCAPED.sub(r"\1", text[1:-1])
    return text[1:] if text.startswith("\\") and len(text) > 1 else text


def masked(text: str) -> str:
    """The text with each expansion as a plain scalar of the same length; a line of its own becomes a comment."""
    hidden = re.sub(f"{TEMPLATE}|{EXPANSION}", lambda found: found[0].translate(HIDDEN), text)
    return re.sub(rf"(?m)^([ \t]*)(?={MASK}+[ \t\r]*$)", rf"\1{OMITTED}", hidden)


def unmasked(text: str) -> str:
    return text.replace(OMITTED, "").translate(SHOWN)
