"""Measures how plainly packages are written.

    python -m tools.plain [DIRECTORY ...]

By default it is trtspec by room. Prints nodes of the syntax tree per statement, and each thing that
a plain style avoids, as a count and per 100 statements. A copy of the package is formatted by `ruff
format` at 100 columns first. budgets.toml limits the counts.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.weight import DEFINITIONS, ROOT, room

PACKAGE = ROOT / "trtspec"
AVOIDED = ("parallel", "conditional", "vague_names", "short_helpers", "docstrings")
VAGUE_NAMES = ("found", "one", "place", "again", "about", "kind", "own", "said")
# a beginning that names nothing, a second sentence behind a semicolon, and pronouns in place of
# nouns
DOCSTRING = re.compile(
    r"\A(What|Of|That|Those|As)\b|;|\b(that|those) of\b|\bof which\b|\bis none\b"
)
HELPER_LINES = 3  # with the `def`, without the docstring


def main() -> None:
    print(f"{'':16} statements nodes/st." + "".join(f"{name:>15}" for name in AVOIDED))
    for package in map(Path, sys.argv[1:] or [str(PACKAGE)]):
        rooms = measured(package)
        if package == PACKAGE:
            for name, counts in rooms.items():
                print_row(name, counts)
        print_row(package.name, sum(rooms.values(), Counter()))


def print_row(name: str, counts: Counter[str]) -> None:
    statements = counts["statements"]
    line = f"{name:16} {statements:10,} {counts['nodes'] / statements:9.2f}"
    for avoided in AVOIDED:
        line += f"{counts[avoided]:6,}{100 * counts[avoided] / statements:7.2f} %"
    print(line)


def measured(package: Path = PACKAGE) -> dict[str, Counter[str]]:
    """Statements, nodes and what is avoided, by room of the package."""
    trees = formatted(package)
    uses: Counter[str] = Counter()
    for tree in trees.values():
        uses.update(names_read(tree))
    rooms: dict[str, Counter[str]] = {}
    for path, tree in sorted(trees.items()):
        rooms.setdefault(room(path), Counter()).update(counted(tree, uses))
    for counts in rooms.values():
        counts["nodes_per_statement"] = counts["nodes"] / counts["statements"]
    return rooms


def formatted(package: Path) -> dict[Path, ast.Module]:
    """The syntax trees of a formatted copy of the package, by path below it."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100", "--quiet"]
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(package, Path(temporary) / "package")
        subprocess.run([*command, "--no-cache", str(copy)], check=True)
        files = sorted(copy.rglob("*.py"))
        return {path.relative_to(copy): ast.parse(path.read_text("utf-8")) for path in files}


def names_read(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def counted(tree: ast.Module, uses: Counter[str]) -> Counter[str]:
    """The counts of one file. `uses`: how often the package reads each name."""
    nodes = list(ast.walk(tree))
    return Counter(
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        nodes=len(nodes),
        parallel=sum(is_parallel(node) for node in nodes),
        conditional=sum(isinstance(node, ast.IfExp) for node in nodes),
        vague_names=sum(name_bound(node) in VAGUE_NAMES for node in nodes),
        short_helpers=sum(is_short_helper(node, uses) for node in nodes),
        docstrings=sum(DOCSTRING.search(docstring(node)) is not None for node in nodes),
    )


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns unlike values to several targets, and is not a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(part) for part in getattr(node.targets[0], "elts", [])}
    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
    return (
        bool(targets) and targets.isdisjoint(read) and len(set(map(likeness, node.value.elts))) > 1
    )


def likeness(value: ast.expr) -> str:
    """Equal for calls of one function, parts of one object, and literals of one type."""
    if isinstance(value, ast.Constant):
        return type(value.value).__name__
    if isinstance(value, ast.Call):
        return ast.unparse(value.func)
    if isinstance(value, ast.Attribute | ast.Subscript):
        return ast.unparse(value.value)
    return ast.unparse(value)


def name_bound(node: ast.AST) -> str | None:
    """The name of a parameter, or of a variable where it is assigned."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def docstring(node: ast.AST) -> str:
    return (ast.get_docstring(node) or "") if isinstance(node, DEFINITIONS) else ""


def is_short_helper(node: ast.AST, uses: Counter[str]) -> bool:
    """Whether a function without decorators is short and used in one place of the package."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return False
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = ((body[-1].end_lineno or 0) - body[0].lineno + 2) if body else 0
    return uses[node.name] == 1 and lines <= HELPER_LINES


if __name__ == "__main__":
    main()
