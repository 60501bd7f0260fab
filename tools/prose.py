"""Checks the project's text: spelling (codespell), style (proselint) and vocabulary.yaml's words.

`python -m tools.prose` (part of `make lint`) reads every Markdown file of the repository, without
its code, and for the vocabulary also the messages, help texts, docstrings and comments of the
package and of tools/. It prints `FILE:LINE: finding` and exits 1 when there is one.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import yaml
from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tools.pages import ROOT, paragraphs

VOCABULARY = yaml.safe_load((ROOT / "tools" / "vocabulary.yaml").read_text(encoding="utf-8"))
WORDS = [(re.compile(word["avoid"], re.IGNORECASE), word["use"]) for word in VOCABULARY["words"]]
OFF = re.compile("|".join(VOCABULARY["proselint_off"]))


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings with a space in them that are no docstrings."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in statements:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def explanations(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def vocabulary(text: str) -> Iterator[str]:
    for pattern, use in WORDS:
        for found in pattern.finditer(text):
            yield f"{found.group()!r}: write {use}"


def style(found: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """(line, finding) by proselint, which reads a page at once; a sign separates paragraphs."""
    between = "\n\n\u00b6\n\n"
    starts, page = [], ""
    for _, text in found:
        starts.append(len(page) + 1)  # proselint puts a line feed before the text
        page += text + between
    for one in LintFile("page", page).lint(DEFAULT) if page else []:
        result = one.check_result
        finding = f"{result.message} ({result.check_path})"
        if not OFF.search(finding):
            yield found[bisect_right(starts, result.span[0]) - 1][0], finding


def spelling(paths: list[Path]) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "codespell_lib",
        "-L",
        ",".join(VOCABULARY["spelled_right"]),
        *map(str, paths),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def findings() -> Iterator[str]:
    pages = files("*.md")
    for path in pages:
        page = list(paragraphs(path))
        found = [(line, finding) for line, text in page for finding in vocabulary(text)]
        yield from (
            f"{path.relative_to(ROOT)}:{line}: {finding}"
            for line, finding in found + list(style(page))
        )
    for path in files("trtspec/*.py", "tools/*.py"):
        name, source = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        texts = [*explanations(source), *(messages(source) if name.parts[0] == "trtspec" else ())]
        for line, text in texts:
            yield from (f"{name}:{line}: {finding}" for finding in vocabulary(text))
    for line in spelling([*pages, *files("trtspec/*.py", "trtspec/data/problems/*.yaml")]):
        yield line.removeprefix(f"{ROOT}/")


if __name__ == "__main__":
    CheckRegistry().register_many(__register__)
    found = list(findings())
    print("\n".join(found))
    sys.exit(1 if found else 0)
