"""What README and docs/ hold: pages, words, sentences, commands with output, code blocks.

`python -m tools.pages` prints the words of each page and the sentences of more than 32 words.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
FIRST_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = FIRST_PAGES + sorted(ROOT.glob("docs/**/*.md"))
WRITTEN = [page for page in PAGES if page.parent.name != "reference"]  # by hand
PAGE_WORDS, DEEP_WORDS, LONG_SENTENCE = 900, 1500, 32
DEEP = {"eagle3.md", "nvfp4.md", "plan-model.md", "reference-engine.md"}
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]*\w)")
SHELLS = ("console", "bash", "sh", "shell")
PROGRAMS = {
    "trtspec",
    "docker",
    "helm",
    "kubectl",
    "kubernetes-validate",
    "make",
    "pip",
    "python",
    "python3",
    "sbatch",
    "squeue",
    "scancel",
    "enroot",
    "ssh-keygen",
    "curl",
    "git",
    "vllm",
    "trtllm-serve",
}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
CAPTURED = re.compile(r"\s*^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Sentence:
    page: str
    line: int
    words: int
    text: str


@dataclass(frozen=True)
class Command:
    line: int
    text: str
    shown: tuple[str, ...] = ()  # lines of output that the page shows below it

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands(page: Path) -> Iterator[Command]:
    """Commands in console and indented blocks, with captured output; a backslash joins lines."""
    text = page.read_text(encoding="utf-8")
    blocks = [
        (found.start(3), found.end(), found[3])
        for found in FENCE.finditer(text)
        if found[2] in SHELLS
    ]
    bare = FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    blocks += [
        (found.start(), found.end(), found[0])
        for found in re.finditer(r"(?:^ {4}.*\n)+", bare, re.MULTILINE)
    ]
    for start, end, block in sorted(blocks):
        found = list(commands_of(block, text.count("\n", 0, start) + 1))
        if found and (output := CAPTURED.match(text, end)):
            found[-1] = replace(found[-1], shown=tuple(output[1].splitlines()))
        yield from found


def commands_of(block: str, first: int) -> Iterator[Command]:
    joined, at = "", first
    for number, line in enumerate(block.splitlines(), first):
        joined, at = (joined + " " + line.strip(), at) if joined else (line.strip(), number)
        if joined.endswith("\\"):
            joined = joined[:-1].rstrip()
            continue
        stripped = re.sub(r"^(\$ |(?:[A-Z_]+=\S+ )+)", "", joined)
        if stripped.split(" ")[0] in PROGRAMS:
            yield Command(at, stripped)
        joined = ""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[2], textwrap.dedent(match[3])))
    return [block for block in found if not languages or block.language in languages]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def words_allowed(page: Path) -> int:
    return DEEP_WORDS if page.name in DEEP else PAGE_WORDS


def count_words(page: Path) -> int:
    """Everything that white space separates, code and tables included, as `wc -w` counts."""
    return len(page.read_text(encoding="utf-8").split())


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, heading, list item and table cell; inline code is a word."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type != "inline" or token.map is None:
            continue
        parts = []
        for number, child in enumerate(token.children or []):
            parts.append(
                {"code_inline": f"Code{number}", "softbreak": "\n"}.get(child.type, child.content)
            )
        yield token.map[0] + 1, "".join(parts)


def long_sentences(page: Path) -> Iterator[Sentence]:
    """Sentences of more than LONG_SENTENCE words; an inline code span is one word."""
    for line, text in paragraphs(page):
        for sentence in SENTENCE_END.split(text):
            if (words := len(sentence.split())) > LONG_SENTENCE:
                yield Sentence(name(page), line, words, " ".join(sentence.split()))


def main() -> None:
    counted = {page: count_words(page) for page in PAGES}
    for page in sorted(WRITTEN, key=counted.__getitem__):
        print(
            f"{counted[page]:6,} "
            f"{name(page)}{' over' if counted[page] > words_allowed(page) else ''}"
        )
    written = sum(counted[page] for page in WRITTEN)
    print(f"{written:6,} by hand; generated: {sum(counted.values()) - written:,}")
    for one in (one for page in WRITTEN for one in long_sentences(page)):
        print(f"{one.page}:{one.line}: {one.words} words: {one.text}")


if __name__ == "__main__":
    main()
