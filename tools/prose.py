"""Checks the project's public text: spelling (codespell), style (proselint), and the words of vocabulary.yaml.

`python tools/prose.py` (part of `make lint`) reads every Markdown file of the repository, without its code, and for the
vocabulary also the messages, help texts and problem texts of the package. It prints `FILE:LINE: finding` and exits 1
when there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VOCABULARY = yaml.safe_load((HERE / "vocabulary.yaml").read_text(encoding="utf-8"))
WORDS = [(re.compile(word["avoid"], re.IGNORECASE), word["use"]) for word in VOCABULARY["words"]]
OFF = re.compile("|".join(VOCABULARY["proselint_off"]))


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def markdown_prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, heading, list item and table cell; inline code becomes a word of its own."""
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8")):
        if token.type != "inline" or token.map is None:
            continue
        parts = []
        for number, child in enumerate(token.children or []):
            parts.append({"code_inline": f"Code{number}", "softbreak": "\n"}.get(child.type, child.content))
        yield token.map[0] + 1, "".join(parts)


def package_messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings with a space in them; docstrings are for those who read the code, and left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in statements else None
        if isinstance(text, str) and " " in text.strip():
            yield node.lineno, text


def vocabulary(text: str) -> Iterator[str]:
    for pattern, use in WORDS:
        for found in pattern.finditer(text):
            yield f"{found.group()!r}: write {use}"


def style(paragraphs: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """(line, finding) by proselint, which reads a page at once; a sign between paragraphs keeps them apart."""
    between = "\n\n\u00b6\n\n"
    starts, page = [], ""
    for _, text in paragraphs:
        starts.append(len(page) + 1)  # proselint puts a line feed before the text
        page += text + between
    for found in LintFile("page", page).lint(DEFAULT) if page else []:
        result = found.check_result
        finding = f"{result.message} ({result.check_path})"
        if not OFF.search(finding):
            yield paragraphs[bisect_right(starts, result.span[0]) - 1][0], finding


def spelling(paths: list[Path]) -> list[str]:
    command = [sys.executable, "-m", "codespell_lib", "-L", ",".join(VOCABULARY["spelled_right"]), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def findings() -> Iterator[str]:
    pages = files("*.md")
    for path in pages:
        paragraphs = list(markdown_prose(path))
        found = [(line, finding) for line, text in paragraphs for finding in vocabulary(text)]
        yield from (f"{path.relative_to(ROOT)}:{line}: {finding}" for line, finding in found + list(style(paragraphs)))
    for path in files("trtspec/*.py"):
        for line, text in package_messages(path):
            yield from (f"{path.relative_to(ROOT)}:{line}: {finding}" for finding in vocabulary(text))
    for line in spelling([*pages, *files("trtspec/*.py", "trtspec/data/problems/*.yaml")]):
        yield line.removeprefix(f"{ROOT}/")


if __name__ == "__main__":
    CheckRegistry().register_many(__register__)
    found = list(findings())
    print("\n".join(found))
    sys.exit(1 if found else 0)
